"""Published training runs as workloads: rows of a CSV file, and the reasons why some cannot be predicted.

    row of a CSV file -> readings of its columns (reader) -> workload (row) -> PublishedRun | SkippedRow

The columns are those of a table of measured runs: model dimensions, layout, chip, framework, interconnect, and the
throughput ``tok_s_chip_norm``. No rule names a source, and no rule reads a throughput except to compare it.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from hlat.hardware import Catalog, load_catalog
from hlat.runtime.errors import PlanError
from published_runs.program import RunWorkload
from published_runs.reader import Reading, UnreadableError, is_unstated, parse_number
from published_runs.row import CsvRow, read_run

_OUT_OF_MEMORY = re.compile(r"\b(?:cuda )?(?:oom|out[- ]of[- ]memory)\b", re.IGNORECASE)
# Columns that may have the words above in place of a number, or say how a run ended.
_OUTCOMES = ("outcome", "tok_s_chip_norm", "tokens_per_s_per_chip", "step_time_s", "mfu", "memory_per_chip_gib")
REQUIRED = ("chip", "n_chips", "layers", "hidden", "heads", "seq_len", "global_batch", "tp", "pp")


@dataclass(frozen=True)
class PublishedRun:
    """A measured run.

    Attributes:
        name: id of the row.
        group: source of the row.
        workload: input of the cost model.
        chips: number of chips, as the source counts them.
        tokens_per_second: measured throughput per chip; None if not published.
        ran_out: True if it is published that the run was out of memory.
        memory_gib: measured memory per device; None if not published.
        memory_kind: method of the memory measurement, in the source's words.
        readings: value of every column that the prediction depends on, and its certainty.
        row: the row as read.
    """

    name: str
    group: str
    workload: RunWorkload
    chips: int
    tokens_per_second: float | None
    ran_out: bool
    memory_gib: float | None
    memory_kind: str
    readings: tuple[Reading[object], ...]
    row: CsvRow

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions about what the row leaves open, one phrase each."""
        return tuple(reading.reason for reading in self.readings if reading.sure == "assumed")

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the step time that uncertain readings add."""
        return float(sum(reading.spread**2 for reading in self.readings) ** 0.5)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.workload.layout.global_batch * self.workload.layout.sequence

    @property
    def step_seconds(self) -> float | None:
        """Measured seconds of a step; None if no throughput is published."""
        speed = self.tokens_per_second
        return None if speed is None else self.tokens_per_step / (speed * self.chips)


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be predicted, and the reason."""

    name: str
    group: str
    reason: str


def read_published_runs(path: Path, catalog: Catalog | None = None) -> tuple[list[PublishedRun], list[SkippedRow]]:
    """Read every row of a file, as a run or as a skipped row.

    Args:
        path: CSV file.
        catalog: chips and machines; None for the shipped ones.

    Raises:
        PlanError: the file cannot be read or lacks required columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise PlanError(f"{path} has no rows below its header")
    missing = [name for name in REQUIRED if name not in rows[0]]
    if missing:
        needed = ", ".join(REQUIRED)
        raise PlanError(f"{path}: a table of runs needs the columns {needed}; missing: {', '.join(missing)}")
    runs: list[PublishedRun] = []
    skipped: list[SkippedRow] = []
    for number, row in enumerate(rows):
        name, group = row.get("id") or f"row {number + 1}", row.get("source") or "unnamed source"
        try:
            runs.append(_run(name, group, row, catalog or load_catalog()))
        except UnreadableError as error:
            skipped.append(SkippedRow(name, group, str(error)))
    return runs, skipped


def _run(name: str, group: str, row: CsvRow, catalog: Catalog) -> PublishedRun:
    read = read_run(row, catalog)
    layout = read.workload.layout
    ran_out = any(_OUT_OF_MEMORY.search(row.get(column) or "") for column in _OUTCOMES)
    speed = seconds = None
    if not ran_out:
        speed = _measured(row, "tok_s_chip_norm") or _measured(row, "tokens_per_s_per_chip")
        seconds = _measured(row, "step_time_s")
    if speed is None and seconds is not None:
        speed = layout.global_batch * layout.sequence / seconds / read.chips
    return PublishedRun(
        name=name,
        group=group,
        workload=read.workload,
        chips=read.chips,
        tokens_per_second=speed,
        ran_out=ran_out,
        memory_gib=None if ran_out else _measured(row, "memory_per_chip_gib"),
        memory_kind=row.get("mem_kind") or "",
        readings=read.readings,
        row=row,
    )


def _measured(row: CsvRow, column: str) -> float | None:
    """A measured value; None if not published.

    Raises:
        UnreadableError: the column has a text that is no number.
    """
    if is_unstated(row.get(column)):
        return None
    try:
        return parse_number(row[column]) or None
    except UnreadableError as error:
        raise UnreadableError(f"{column} {error}") from error
