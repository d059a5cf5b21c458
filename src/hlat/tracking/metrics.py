"""metrics.jsonl: one line of numbers per logged step, and no step twice.

    Tracker.log -> MetricsFile.append -> metrics.jsonl -> read_metrics -> reports, tests, you

A run that resumes from step k drops every line of a later step before it writes the first: the file of a run that was
interrupted equals that of one that never was, but for the timings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hlat.tracking.jsonl import JsonLines, decode, keep_lines, read_records, storage_errors, with_non_finite

Metrics = Mapping[str, Any]
"""One logged step. Values are numbers, but for ``seconds``. A key whose value is unknown is left out.

| key | unit and meaning |
|-----|------------------|
| ``step`` | optimizer steps done, this one included; required |
| ``tokens`` | tokens of the steps done since the start of the run |
| ``samples`` | sequences consumed since then, those that were left out among them: the position in the data |
| ``batch_crc32`` | CRC-32 of the token ids of this step's sequences, added up modulo 2^32 |
| ``loss`` | nats per token over this step's batch |
| ``val_loss``, ``val_bits_per_byte`` | validation: nats per token, bits per byte of text; only where a step validated |
| ``grad_norm``, ``param_norm`` | global L2 norms: of the gradient before clipping, of the parameters after the step |
| ``lr`` | learning rate of this step |
| ``tokens_per_second`` | training rate since the line before, without validation and checkpoints |
| ``mfu``, ``mfu_full`` | share of the peak FLOP/s, attention counted as causal, and counted in full |
| ``memory_bytes`` | peak so far |
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
        """Damaged lines inside the file, which were dropped; the last step that it has, 0 for none."""
        self._file = JsonLines(path)

    def rewind(self, step: int) -> None:
        """Drop every line of a later step than this."""
        self._file.close()
        _cut_back(self._file.path, step)
        self._file = JsonLines(self._file.path)

    def append(self, metrics: Metrics) -> None:
        """Add the line of one step; it survives the death of the process when this returns."""
        assert isinstance(metrics.get("step"), int), "a line of metrics names its step"
        self._file.append(dict(metrics))

    def sync(self) -> None:
        """Wait until every line so far would survive a power cut."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_back(path: Path, last: int) -> tuple[int, int]:
    """Drop the lines of later steps, and damaged ones. Returns how many of these there were, and the last step kept."""
    with storage_errors(path, "read"), path.open("rb") as lines:
        steps = [_step_of(line) for line in lines]
    if any(step is None or step > last for step in steps):
        keep_lines(path, lambda line: (step := _step_of(line)) is not None and step <= last)
    return steps.count(None), max((step for step in steps if step is not None and step <= last), default=0)


def _step_of(line: bytes) -> int | None:
    """The step of a line, or None if the line is damaged."""
    record = decode(line)
    step = record.get("step") if record is not None else None
    return step if isinstance(step, int) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every logged step, in order; floats are bit for bit what was logged, NaN and infinities included.

    A half-written last line, of a run at work or killed, is ignored.

    Raises:
        DataError: another line is not a JSON object; the message names it.
        StorageError: the file cannot be read.
    """
    return [{key: with_non_finite(value) for key, value in record.items()} for record in read_records(path)]
