"""TensorBoard event files: the metrics as scalars.

metrics -> train/loss, train/lr, ...   validation/loss, validation/NAME/loss, ...   task/NAME/acc, ...

A line of metrics is one record, written synchronously. torch's SummaryWriter is not used: it writes in a thread that
only prints its errors, and it reopens the file by name for each record, even if the run's folder has been replaced.
"""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from hlat.runtime.process.appended_file import AppendedFile
from hlat.tracking.jsonl import as_storage_error
from hlat.tracking.metrics import Metrics
from hlat.tracking.outputs import TrackerNote, moved_note
from hlat.tracking.tensorboard.event_file import scalars_event, start_event, version_event, write_record

_VALIDATION = {"val_loss": "validation/loss", "val_bits_per_byte": "validation/bits_per_byte"}
_SETS, _TASKS = "val/", "task/"  # first parts of keys
# The step is the axis; a checksum is not a quantity.
_NOT_PLOTTED = frozenset({"step", "batch_crc32"})
_FILES = itertools.count()  # file numbers of this process; TensorBoard reads files in the order of their names


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return tag and value of every metric that can be plotted."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if key in _NOT_PLOTTED:
            continue
        tag = _tag(key)
        fields: dict[str, Any] = (
            {f"{tag}/{name}": field for name, field in value.items()} if isinstance(value, dict) else {}
        )
        for name, number in (fields or {tag: value}).items():
            if isinstance(number, int | float):
                found[name] = float(number)
    return found


def _tag(key: str) -> str:
    if key.startswith(_SETS):
        return f"validation/{key.removeprefix(_SETS)}"
    return key if key.startswith(_TASKS) else _VALIDATION.get(key, f"train/{key}")


class TensorBoard:
    """Writer of scalars to event files in a folder; the folder is created in an existing one.

    Scalars that an earlier process of the run wrote for steps after ``start_step`` are marked as superseded, so that
    TensorBoard shows each step once.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self._folder = folder
        self._move = ""
        self._writer = self._open(start_step)

    def rewind(self, step: int) -> None:
        """Mark the scalars of steps after ``step`` as superseded."""
        self.close()
        self._writer = self._open(step)

    def log(self, metrics: Metrics) -> None:
        """Add the scalars of one step."""
        with as_storage_error(self._folder, "write TensorBoard events"):
            self._move = self._writer.add(metrics["step"], scalars(metrics)) or self._move

    def notes(self) -> list[TrackerNote]:
        """Return a note if the file was moved since the last call; errors are raised."""
        move, self._move = self._move, ""
        return [moved_note(f"{self._folder.name}/{self._writer.name}", move)] if move else []

    def close(self, failed: bool = False) -> None:
        """Close the file. Closing it twice is harmless."""
        self._writer.close()

    def _open(self, step: int) -> "_EventFile":
        with as_storage_error(self._folder, "write TensorBoard events"):
            self._folder.mkdir(exist_ok=True)
            start = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            name = f"{start}.{next(_FILES):06d}"  # TensorBoard reads files in the order of their names
            return _EventFile(self._folder / name, step)


class _EventFile:
    """Event file that supersedes the scalars of other files in its folder for steps after ``step``.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.name, self._file = path.name, AppendedFile(path)
        try:
            write_record(self._file, version_event(time.time(), step + 1))
            write_record(self._file, start_event(time.time(), step + 1))
        except BaseException:
            self.close()
            raise

    def add(self, step: int, values: dict[str, float]) -> str:
        """Write the scalars of a step as one record; return what was done if the file was moved."""
        move = self._file.follow()
        write_record(self._file, scalars_event(time.time(), step, values))
        return move

    def close(self) -> None:
        """Close the file."""
        self._file.close()
