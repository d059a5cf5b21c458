"""TensorBoard event files: the same numbers, as scalars that a browser can plot.

metrics -> train/loss, train/lr, train/seconds/data, ...   validation/loss, validation/bits_per_byte

A line of metrics is one record, written at once. torch's writer hands records to a thread, which prints its errors
where nobody can act on them, and opens the file anew for each: one of that name in another folder, should its own be
gone.
"""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from hlat.tracking.jsonl import storage_errors
from hlat.tracking.metrics import Metrics

_VALIDATION = {"val_loss": "validation/loss", "val_bits_per_byte": "validation/bits_per_byte"}
# The step is the axis; a checksum is not a quantity.
_NOT_PLOTTED = frozenset({"step", "batch_crc32"})
_VERSION = "brain.Event:2"  # of the format; the first record has to say so
_FILES = itertools.count()  # of this process; TensorBoard reads the files of a folder in the order of their names


def scalars(metrics: Metrics) -> dict[str, float]:
    """Tag and value of everything in a line of metrics that can be plotted."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if key in _NOT_PLOTTED:
            continue
        tag = _VALIDATION.get(key, f"train/{key}")
        parts: dict[str, Any] = (
            {f"{tag}/{name}": part for name, part in value.items()} if isinstance(value, dict) else {}
        )
        for name, number in (parts or {tag: value}).items():
            if isinstance(number, int | float):
                found[name] = float(number)
    return found


class TensorBoard:
    """Writes scalars to event files in a folder, which is made in one that exists.

    What an earlier part of the run wrote for steps after ``start_step`` is marked as superseded, so that TensorBoard
    shows each step once.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self._folder = folder
        self._writer = self._open(start_step)

    def rewind(self, step: int) -> None:
        """Mark what was written for steps after ``step`` as superseded."""
        self.close()
        self._writer = self._open(step)

    def log(self, metrics: Metrics) -> None:
        """Add the scalars of one step."""
        with storage_errors(self._folder, "write TensorBoard events"):
            self._writer.add(metrics["step"], scalars(metrics))

    def close(self) -> None:
        """Close the file. Closing it twice is harmless."""
        self._writer.close()

    def _open(self, step: int) -> "_EventFile":
        with storage_errors(self._folder, "write TensorBoard events"):
            self._folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
            return _EventFile(self._folder / name, step)


class _EventFile:
    """A new event file, which supersedes what others of its folder say of steps after ``step``.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        # Importing these takes a fifth of a second, and a run may do without.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        self._event, self._summary = Event, Summary
        self._file = path.open("xb", buffering=0)
        self._records = RecordWriter(self)
        try:
            self._put(step + 1, file_version=_VERSION)
            self._put(step + 1, session_log=SessionLog(status=SessionLog.START))
        except BaseException:
            self.close()
            raise

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write the scalars of a step as one record."""
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._put(step, summary=self._summary(value=points))

    def write(self, data: bytes) -> None:
        """Write all of a record, for its packing."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, step: int, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())
