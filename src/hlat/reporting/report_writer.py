"""The page of one run or of several, from top to bottom.

run folders -> RunRecord each -> summary, loss, training, then each run's history -> one HTML page
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from hlat.page import Html, format_value, page, paragraph, section, table
from hlat.reporting.charts import loss_section, training_section
from hlat.reporting.history import checkpoints_section, incidents_section, samples_section, time_section
from hlat.reporting.mixture import mixture_section
from hlat.reporting.plan_comparison import Machines, plan_section
from hlat.reporting.recipes import recipe_diff_section, recipe_section
from hlat.reporting.run_record import RunRecord, read_run
from hlat.runtime.errors import DataError, StorageError

FILE_NAME = "report.html"
"""Name of the report in the folder of a run, if no other file is asked for."""


def report_page(folders: Sequence[Path], machines: Machines | None = None, *, version: str | None = None) -> Html:
    """Make the report of some runs as one page.

    Args:
        folders: folders of runs, at least one; runs of several are compared.
        machines: what they were trained on; None leaves plan and dollars out.
        version: version of the contents, for a page that comes from a server.

    Raises:
        DataError: a folder is not that of a run, or a line of its metrics or events is damaged.
        StorageError: a file cannot be read.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        PlanError: there is no such kind of price.
    """
    if not folders:
        raise DataError("hlat report: name at least one folder of a run.")
    runs = _distinct([read_run(folder) for folder in folders])
    title = f"{runs[0].name}: report" if len(runs) == 1 else f"{', '.join(run.name for run in runs)}: comparison"
    contents = [
        paragraph(f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."),
        _summary(runs),
        *(paragraph(f"{run.name}: {note}" if len(runs) > 1 else note) for run in runs for note in run.notes),
        recipe_diff_section(runs),
        loss_section(runs),
        training_section(runs),
    ]
    for run in runs:
        contents.append(section("Run" if len(runs) == 1 else f"Run {run.name}", _run_sections(run, machines)))
    return page(title, contents, version=version)


def write_report(folders: Sequence[Path], to: Path | None = None, machines: Machines | None = None) -> Path:
    """Write the report of some runs to a file, in one piece: a reader sees the old file or the new one.

    Args:
        folders: folders of runs; several are compared.
        to: the file; None for ``report.html`` in the folder of the first run.
        machines: what they were trained on.

    Returns:
        The file.

    Raises:
        DataError: a folder is not that of a run, or a line of its metrics or events is damaged.
        StorageError: a file cannot be read or written.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        PlanError: there is no such kind of price.
    """
    contents = report_page(folders, machines)
    target = to if to is not None else folders[0] / FILE_NAME
    new = target.with_name(f".{target.name}.{uuid4().hex[:8]}.new")
    try:
        new.write_text(contents, encoding="utf-8")
        os.replace(new, target)  # noqa: PTH105  (the counterpart of unlink below, on one line of the story)
    except OSError as error:
        raise StorageError(
            f"{target}: cannot be written: {error.strerror or error}. Name another file with -o FILE."
        ) from error
    finally:
        new.unlink(missing_ok=True)
    return target


def _distinct(runs: list[RunRecord]) -> list[RunRecord]:
    """Give runs of one name their folders as names."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [read_run(run.folder, str(run.folder)) for run in runs]


def _summary(runs: Sequence[RunRecord]) -> Html:
    rows = []
    for run in runs:
        total = run.recipe.total_steps if run.recipe is not None else None
        state = f"{run.status.state}: {run.status.reason}" if run.status.reason else run.status.state
        begun = next((event for event in run.events if event.kind == "start"), None)
        parameters = None if begun is None else begun.number("parameters")
        rows.append(
            (
                run.name,
                state,
                f"{run.step:,}" if total is None else f"{run.step:,} of {total:,}",
                _last(run, "tokens"),
                _last(run, "loss"),
                _last(run, "val_loss"),
                _last(run, "tokens_per_second"),
                "" if parameters is None else format_value(parameters),
                "" if begun is None else begun.words("device"),
                "" if begun is None else begun.words("processes"),
            )
        )
    names = (
        *("run", "state", "step", "tokens", "loss", "validation loss", "tokens/s"),
        *("parameters", "device", "processes"),
    )
    return table(names, rows, caption="Runs" if len(runs) > 1 else "Run")


def _last(run: RunRecord, name: str) -> str:
    value = run.last(name)
    return "" if value is None else format_value(value)


def _run_sections(run: RunRecord, machines: Machines | None) -> list[Html]:
    return [
        time_section(run),
        plan_section(run, machines),
        incidents_section(run),
        checkpoints_section(run),
        mixture_section(run),
        samples_section(run),
        recipe_section(run),
    ]
