"""metrics.jsonl: one line of metrics per logged step, with no step twice.

    Tracker.log -> MetricsFile.append -> metrics.jsonl -> read_metrics -> reports, tests, users

A run that resumes from step k first drops the lines of all later steps. So the file of an interrupted run equals that
of an uninterrupted one, except for the times.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hlat.tracking.jsonl import JsonLines, as_storage_error, decode, filter_lines, from_json_value, read_records

_TAIL_BYTES = 1 << 18  # longer than any line
Metrics = Mapping[str, Any]
"""Metrics of a logged step. Values are numbers, except ``seconds``. A key whose value is unknown is left out.

| key | unit and meaning |
|-----|------------------|
| ``step`` | optimizer steps done, this one included; required |
| ``tokens`` | tokens of the steps done since the start of the run |
| ``samples`` | sequences consumed since then, skipped ones included: the position in the data |
| ``batch_crc32`` | CRC-32 of the token ids of this step's sequences, added up modulo 2^32 |
| ``loss`` | nats per token over this step's batch |
| ``val_loss``, ``val_bits_per_byte`` | validation: nats per token, bits per byte of text; only where a step validated |
| ``val/NAME/loss``, ``val/NAME/bits_per_byte`` | the same for each set of ``evaluation.sets`` |
| ``val/sources/NAME/loss``, ``.../bits_per_byte`` | the same for each source of the validation split, if several |
| ``task/NAME/acc``, ``/acc_norm``, ``/bits_per_byte`` | scores of each task of ``evaluation.tasks`` |
| ``grad_norm``, ``param_norm`` | global L2 norms: of the gradient before clipping, of the parameters after the step |
| ``lr`` | learning rate of this step |
| ``tokens_per_second`` | training rate since the line before, without validation and checkpoints |
| ``mfu``, ``mfu_full`` | share of the peak FLOP/s, attention counted as causal, and counted in full |
| ``memory_bytes`` | peak memory so far, of the rank that used most: tensors on an accelerator, the process on a CPU |
| ``memory_reserved_bytes`` | peak of what torch's allocator has taken from the accelerator, gaps included |
| ``memory_retries`` | times that it had to give memory back before it found room, of the rank with most |
| ``seconds`` | by phase (``PHASES`` of hlat.runtime.process), since the line before: ``data``, ``forward``, ... |
"""


class MetricsFile:
    """The metrics of a run, opened to continue after ``start_step``.

    Raises:
        StorageError: the file cannot be opened, cut back or written.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        with JsonLines(path):  # cuts off a half-written last line
            pass
        self.unreadable, self.last = _cut_back(path, start_step)
        """Number of damaged lines that were dropped; last step in the file, 0 if it has none."""
        self._file = JsonLines(path)

    def rewind(self, step: int) -> None:
        """Drop the lines of all steps after ``step``."""
        self._file.follow()
        self._file.close()
        _cut_back(self._file.path, step)
        self._file = JsonLines(self._file.path)

    def append(self, metrics: Metrics) -> None:
        """Append the line of one step; it survives the end of the process when this returns."""
        assert isinstance(metrics.get("step"), int), "a line of metrics has its step"
        self._file.append(dict(metrics))

    def last_move(self) -> str:
        """Return what was done if the file was renamed, removed or replaced since the last call."""
        return self._file.last_move()

    def sync(self) -> None:
        """Sync the file, so that every line so far survives a power failure."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_back(path: Path, last: int) -> tuple[int, int]:
    """Drop damaged lines and those of later steps; return the number of damaged ones, and the last step kept."""
    with as_storage_error(path, "read"), path.open("rb") as lines:
        steps = [_step_of(line) for line in lines]
    if any(step is None or step > last for step in steps):
        filter_lines(path, lambda line: (step := _step_of(line)) is not None and step <= last)
    return steps.count(None), max((step for step in steps if step is not None and step <= last), default=0)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, or None if the line is damaged."""
    record = decode(line)
    step = record.get("step") if record is not None else None
    return step if isinstance(step, int) else None


def read_last_metrics(path: Path) -> dict[str, Any] | None:
    """Return the metrics of the last complete line, without reading the lines before; None if there is none.

    Raises:
        StorageError: the file cannot be read.
    """
    with as_storage_error(path, "read"), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if (record := decode(line)) is not None:
            return {key: from_json_value(value) for key, value in record.items()}
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of every logged step, in order; floats have the logged bits, NaN and infinities included.

    A half-written last line, of a run in progress or killed, is ignored.

    Raises:
        DataError: another line is not a JSON object; the message names it.
        StorageError: the file cannot be read.
    """
    return [from_json_value(record) for record in read_records(path)]
