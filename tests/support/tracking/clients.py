"""Clients of a tracking service that record to a file, or misbehave in every way that a service can."""

import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hlat.tracking.hosted import HostedRun


class Recording:
    """Appends what it gets to <run.dir>/recorded.jsonl."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        self._file = Path(run.run_dir) / "recorded.jsonl"
        self._write({"open": saved_id, "name": run.name, "recipe": run.recipe, "settings": run.settings})
        return saved_id or "the id"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, "values": values})

    def close(self, failed: bool) -> None:
        self._write({"failed": failed})

    def _write(self, record: object) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")


class RaisingAtOnce(Recording):
    """Cannot begin."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        raise ConnectionError("no route to https://user:secret@tracker.example/api?key=secret")


class RaisingAlways(Recording):
    """Begins, and refuses everything from then on."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise RuntimeError(f"refused {step}")

    def close(self, failed: bool) -> None:
        raise RuntimeError("refused to end")


class Blocking(Recording):
    """Answers never."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        time.sleep(1e6)


class FullDisk(Recording):
    """Writes to a disk without space."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Crashing(Recording):
    """Takes its process down, as a library in C may."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        os._exit(3)
