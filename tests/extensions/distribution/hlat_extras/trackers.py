"""A tracker that appends lines to a file."""

from hlat.config import Section


class Options(Section):
    """Fields below its name in the recipe."""

    file: str = "lines.txt"


class Lines:
    """Client: runs in a process of its own."""

    Options = Options

    def open(self, run, saved_id):
        self._file = (run.run_dir / run.settings["file"]).open("a")
        print(f"run {run.name}", file=self._file, flush=True)
        return saved_id or "1"

    def log(self, step, values):
        print(step, values["train/loss"], file=self._file, flush=True)

    def close(self, failed):
        self._file.close()
