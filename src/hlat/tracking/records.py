"""Records of a run in its folder: metrics, events and generated texts, written and read.

    Tracker.log   -> MetricsFile.append -> metrics.jsonl  one line per logged step, with no step twice
                     MetricsOutput                        further outputs: TensorBoard, hosted trackers
    Tracker.event -> EventLog.append    -> events.jsonl   the history of a run, in order of time, never truncated
                     append_samples     -> samples.jsonl  step, prompt and text of each text that the model generated
    read_metrics, read_events, read_samples -> reports, tests, users
    metrics.jsonl --superseded lines dropped--> some rows --> columns of numbers --metrics_table--> pyarrow.Table

A run that resumes from step k first drops the lines of metrics of all later steps. So the file of an interrupted run
equals that of an uninterrupted one, except for the times. Events have everything that happened, repeated steps
included: start, resume (with the changes of the recipe), checkpoint, anomaly, rollback, corruption, error, end, ...

Lines become columns as they are read: a million of them take 3 GB as objects of Python, and 0.2 GB as columns.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hlat.runtime.errors import DataError
from hlat.runtime.terminal import escape_controls
from hlat.runtime.urls import redact_json
from hlat.tracking.jsonl import (
    JsonLines,
    as_storage_error,
    decode_record,
    filter_lines,
    flat_fields,
    from_json_value,
    iter_records,
    read_records,
)

if TYPE_CHECKING:
    import pyarrow as pa


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
| ``mfu``, ``mfu_full`` | share of the peak FLOP/s, attention counted as causal, and in full; never above 1 |
| ``memory_bytes`` | peak memory so far, of the rank that used most: tensors on an accelerator, the process on a CPU |
| ``memory_reserved_bytes`` | peak of what torch's allocator has taken from the accelerator, gaps included |
| ``memory_retries`` | times that it had to give memory back before it found room, of the rank with most |
| ``seconds`` | by phase (``PHASES`` of hlat.runtime.process), since the line before: ``data``, ``forward``, ... |
"""


class MetricsFile(JsonLines):
    """The metrics of a run, opened to continue after ``start_step``.

    Raises:
        StorageError: the file cannot be opened, cut back or written.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        JsonLines(path).close()  # cuts off a half-written last line
        self.unreadable, self.last = _cut_back(path, start_step)
        """Number of damaged lines that were dropped; last step in the file, 0 if it has none."""
        super().__init__(path)

    def rewind(self, step: int) -> None:
        """Drop the lines of all steps after ``step``."""
        self.follow()
        self.close()
        _cut_back(self.path, step)
        super().__init__(self.path)

    def append(self, record: Metrics) -> None:
        """Append the line of one step; it survives the end of the process when this returns."""
        assert isinstance(record.get("step"), int), "a line of metrics has its step"
        super().append(dict(record))


def _cut_back(path: Path, last: int) -> tuple[int, int]:
    """Drop damaged lines and those of later steps; return the number of damaged ones, and the last step kept."""
    with as_storage_error(path, "read"), path.open("rb") as lines:
        steps = [_step_of(line) for line in lines]
    # Nothing is rewritten if nothing has to go: the file of a long run is large.
    if any(step is None or step > last for step in steps):
        filter_lines(path, lambda line: (step := _step_of(line)) is not None and step <= last)
    return steps.count(None), max((step for step in steps if step is not None and step <= last), default=0)


def _step_of(line: bytes) -> int | None:
    record = decode_record(line)
    step = record.get("step") if record is not None else None
    return step if isinstance(step, int) else None


def read_last_metrics(path: Path) -> dict[str, Any] | None:
    """Return the metrics of the last complete line, or None, without reading the lines before."""
    with as_storage_error(path, "read"), path.open("rb") as file:
        size = file.seek(0, 2)
        # Only the end is read: the file of a long run is large.
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if (record := decode_record(line)) is not None:
            return {key: from_json_value(value) for key, value in record.items()}
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of every logged step, in order; a half-written last line is ignored. Floats keep every bit."""
    return [from_json_value(record) for record in read_records(path)]


@dataclass(frozen=True)
class TrackerNote:
    """Something that went wrong with an output, for the user and as an event."""

    kind: str  # kind of the event
    text: str  # line for the user
    fields: dict[str, Any]  # fields of the event


def moved_note(name: str, move: str) -> TrackerNote:
    """Return the note about a file of the run that was moved while the run appended to it."""
    kept = "nothing is lost"
    if move == "another file":
        kept = "what was written while a program made that other file may be only in the old one"
    text = f"{name} was renamed, removed or replaced while the run writes to it: opened again, {kept}"
    return TrackerNote("record_restored", text, {"file": name})


class MetricsOutput(Protocol):
    """Further output of the metrics, which a run can do without."""

    def log(self, metrics: Metrics) -> None:
        """Add the metrics of a step; StorageError if they cannot be written: the output is then dropped."""

    def rewind(self, step: int) -> None:
        """Drop steps after ``step``, which will be repeated, if that is possible; may raise StorageError."""

    def notes(self) -> list[TrackerNote]:
        """Return and clear what went wrong, to be reported."""

    def close(self, failed: bool = False) -> None:
        """Close the output; ``failed`` if the run ends by an error. Closing it twice is harmless."""


class EventLog:
    """Append-only file of events, in an existing folder. Each one is synced to disk; events are rare."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = JsonLines(path)

    def append(self, kind: str, /, **fields: Any) -> None:
        """Record that an event of this kind happened now. Fields must be JSON values."""
        assert not fields.keys() & {"time", "event"}, "time and event are set here"
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        # A checkpoint of an earlier version or a library's error may contain credentials in URLs.
        self._file.append({"time": now, "event": kind, **redact_json(fields)})
        self._file.sync()

    def last_move(self) -> str:
        return self._file.last_move()

    def close(self) -> None:
        self._file.close()


read_events = read_records
"""Returns every event, oldest first; raises as ``iter_records``. A half-written last line is ignored."""


SAMPLES_NAME = "samples.jsonl"
"""Name of the file in the folder of a run."""


@dataclass(frozen=True)
class GeneratedText:
    """Text that the model generated at a step."""

    step: int
    prompt: str
    text: str


def append_samples(folder: Path, step: int, samples: Iterable[tuple[str, str]]) -> None:
    """Add prompts with their generated texts to the file in a run's folder; raises StorageError."""
    with closing(EventLog(folder / SAMPLES_NAME)) as log:
        for prompt, text in samples:
            log.append("sample", step=step, prompt=prompt, text=text)


def read_samples(folder: Path) -> list[GeneratedText]:
    """Return generated texts by step; of a repeated step, the last ones. DataError for a damaged line."""
    path = folder / SAMPLES_NAME
    newest: dict[tuple[int, str], GeneratedText] = {}
    for record in read_events(path) if path.is_file() else ():
        step, prompt, text = (record.get(key) for key in ("step", "prompt", "text"))
        if isinstance(step, int) and isinstance(prompt, str) and isinstance(text, str):
            newest[step, prompt] = GeneratedText(step, prompt, text)
    return sorted(newest.values(), key=lambda sample: sample.step)


_ROWS = 1 << 12  # rows that are converted together


def metrics_table(run: Path) -> "pa.Table":
    """Read the metrics of a run, which may be in progress: one row per logged step, ascending.

    A column for each key of ``Metrics``; nested values have a column per key, as in ``seconds.data``. Values that a
    step does not have are null. ``run`` is its folder, or its metrics.jsonl.

    Raises:
        DataError: there is no such file, or a line other than the last is damaged.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise DataError(
            f"{run}: has no metrics. Give the folder of a run that has logged a step, or its metrics.jsonl."
        )
    # A run that resumes repeats steps. hlat cuts off the earlier lines; they are left in files that were concatenated
    # or restored from a copy.
    table = _TableBuilder()
    for number, line in enumerate(iter_records(path), start=1):
        if type(step := line.get("step")) is not int:
            raise DataError(f"{path}: record {number} has no step. Correct or delete that line.")
        values = flat_fields(line).items()
        table.add(step, {name: from_json_value(value) for name, value in values if type(value) is not dict})
    return table.build()


class _TableBuilder:
    """Builder of a table, which keeps finished rows as columns."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._parts: list[dict[str, pa.Array]] = []

    def add(self, step: int, row: dict[str, Any]) -> None:
        # A line replaces all before it whose step is not smaller: they belong to weights that the run no longer has.
        while self._rows or (self._parts and self._parts[-1]["step"][-1].as_py() >= step):
            self._rows = self._rows or _rows_of(self._parts.pop())
            if self._rows[-1]["step"] < step:
                break
            self._rows.pop()
        self._rows.append(row)
        if len(self._rows) == _ROWS:
            self._finish_part()

    def build(self) -> "pa.Table":
        import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

        if self._rows or not self._parts:
            self._finish_part()
        names = dict.fromkeys(["step", *(name for part in self._parts for name in part)])
        return pa.table({name: self._column(name) for name in names})

    def _finish_part(self) -> None:
        names = dict.fromkeys(["step", *(name for row in self._rows for name in row)])
        self._parts.append({name: _column([row.get(name) for row in self._rows]) for name in names})
        self._rows = []

    def _column(self, name: str) -> "pa.ChunkedArray":
        import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

        parts = [part.get(name) for part in self._parts]
        known = {part.type for part in parts if part is not None and part.null_count < len(part)}
        if known == {pa.int64(), pa.float64()}:
            known = {pa.float64()}
        # The narrowest type that holds all parts; text where they have nothing in common.
        wanted = pa.int64() if not known else known.pop() if len(known) == 1 else pa.string()
        lengths = [len(part["step"]) for part in self._parts]
        return pa.chunked_array(
            [_cast(part, wanted, length) for part, length in zip(parts, lengths, strict=True)], wanted
        )


def _rows_of(part: "dict[str, pa.Array]") -> list[dict[str, Any]]:
    columns = {name: column.to_pylist() for name, column in part.items()}
    return [
        {name: values[index] for name, values in columns.items() if values[index] is not None}
        for index in range(len(columns["step"]))
    ]


def _cast(part: "pa.Array | None", wanted: "pa.DataType", length: int) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

    if part is None or part.null_count == len(part):
        return pa.nulls(length, wanted)
    if pa.types.is_string(wanted) and not pa.types.is_string(part.type):
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in part.to_pylist()]
        return pa.array(texts, wanted)
    return part.cast(wanted, safe=False)


def _column(values: Sequence[Any]) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {int}:
        with suppress(OverflowError):  # no step of hlat's: a damaged line, whose number is shown as it is
            return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        whole = int in kinds  # pyarrow refuses integers that a double cannot hold exactly
        floats = [None if value is None else float(value) for value in values] if whole else values
        return pa.array(floats, pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array([None if text is None else escape_controls(text) for text in texts], pa.string())
