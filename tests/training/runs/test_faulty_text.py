"""Errors in the text of a run of two processes: one message, an exit code, and the run can be resumed."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.support.commands import StartedCommand

pytestmark = pytest.mark.slow

_CHANGED = "the file changed while it was being read. Run again once it is complete."
_FILES, _BYTES = 8, 32_000


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files of lines that a run reads for many epochs."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(_FILES):
        lines = (f'{{"text": "{" ".join(f"word{(i * 7 + number) % 97}" for i in range(300))}"}}\n' for _ in range(15))
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


class Run:
    """``hlat train`` with two processes; ``at_work`` is called after ten steps."""

    def __init__(self, recipe: Path, run: Path, path: object, *more: str) -> None:
        self._command = ["train", str(recipe), "--nproc", "2"]
        self._command += [f"data.path={path}", f"run.dir={run}", "data.mode=online", "data.streams=4"]
        self._command += ["tracking.console=plain", *more]

    def end(self, at_work: Callable[[], object] = lambda: None) -> tuple[int, str]:
        """Return the exit code and the complete output."""
        lines = []
        process = StartedCommand(*self._command)
        for line in process.stdout:
            lines.append(line)
            if "step 10/" in line:
                at_work()
        return process.wait(), "".join(lines)


def _rewrite(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"word1", b"ward1"))


def _rewrite_and_keep_times(file: Path) -> None:
    stat = file.stat()
    _rewrite(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda file: os.truncate(file, 20_000), _CHANGED),
        (_rewrite, _CHANGED),
        (_rewrite_and_keep_times, "the content of the file has changed: it differs within bytes 0 to"),
        (Path.unlink, "cannot be read: No such file or directory"),
    ],
    ids=["truncated", "replaced", "replaced with the same time", "missing"],
)
@pytest.mark.parametrize("unreadable", ["0", "0.5"])
def test_files_that_change_during_a_run_are_an_error(
    recipe_file: Path, texts: Path, tmp_path: Path, fault: Callable[[Path], object], message: str, unreadable: str
) -> None:
    """In a changed file a truncated line is not reported as a bad row, nor skipped as one."""
    run = Run(recipe_file, tmp_path / "run", texts, "training.steps=100000", f"data.unreadable_rows={unreadable}")
    code, text = run.end(lambda: [fault(file) for file in texts.iterdir()])
    assert code == 2 and message in text and "Traceback" not in text, text
    assert "invalid JSON" not in text


def test_text_replaced_with_the_same_size_and_time_is_found_at_the_next_start(
    recipe_file: Path, texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert Run(recipe_file, run, texts, "training.stop_after=5").end()[0] == 0
    for file in texts.iterdir():
        _rewrite_and_keep_times(file)
    code, text = Run(recipe_file, run, texts).end()
    assert code == 2 and "contains data that was prepared differently" in text, text
    assert f"{texts / '0.jsonl'} and {_FILES - 1} more changed since" in text


def test_a_moved_corpus_is_read_at_its_new_path(recipe_file: Path, texts: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    run = tmp_path / "run"
    assert Run(recipe_file, run, texts, "training.stop_after=5").end()[0] == 0
    texts.rename(moved)
    code, text = Run(recipe_file, run, texts).end()
    assert code == 2 and f"{texts}: no such file or folder" in text, text
    code, text = Run(recipe_file, run, moved).end()
    assert code == 0 and "finished at step 40" in text, text


def test_two_runs_can_share_a_folder_of_prepared_data(recipe_file: Path, texts: Path, tmp_path: Path) -> None:
    """They start at the same time: one prepares, the other waits for it."""
    ends: list[tuple[int, str]] = []

    def work(name: str) -> None:
        ends.append(Run(recipe_file, tmp_path / name, texts, f"data.prepared_dir={tmp_path / 'shared'}").end())

    both = [Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert [code for code, _ in ends] == [0, 0], ends
    assert (tmp_path / "one" / "metrics.jsonl").stat().st_size
    lasts = [next(line for line in text.splitlines() if line.startswith("finished")) for _, text in ends]
    assert lasts[0] == lasts[1]


@pytest.fixture
def server(texts: Path) -> Iterator[str]:
    """HTTP server of the files, on loopback."""

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(texts))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}/*.jsonl"
        served.shutdown()


def test_a_run_resumes_after_the_disk_of_the_cache_was_full(recipe_file: Path, server: str, tmp_path: Path) -> None:
    """Another program fills the disk, even as the cache frees space; the run resumes once there is space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    other, ended = disk / "other", Event()

    def fill() -> None:
        with other.open("wb", buffering=0) as file:
            while not ended.wait(0.001):
                with suppress(OSError):
                    file.write(bytes(4_096))

    try:
        few = f"data.cache_gib={5 * _BYTES / 2**30}"  # so that files are fetched repeatedly
        run = tmp_path / "run"
        settings = [f"data.cache_dir={disk / 'cache'}", few, "data.streams=2"]
        code, text = Run(recipe_file, run, server, *settings, "training.steps=100000").end(Thread(target=fill).start)
        ended.set()
        assert code == 3 and f"{disk / 'cache'}: cannot store http://127.0.0.1" in text, text
        assert "No space left on device" in text and "data.cache_dir" in text and "Traceback" not in text
        other.unlink()
        step = int(re.findall(r"step (\d+)", text)[-1])  # reached by the last attempt, or its start
        fewer = [f"training.steps={step + 20}", "schedule.horizon_steps=100000"]
        code, text = Run(recipe_file, run, server, *settings, *fewer).end()
        assert code == 0 and "resumed at step" in text, text
    finally:
        ended.set()
        subprocess.run(["umount", str(disk)], check=True)
