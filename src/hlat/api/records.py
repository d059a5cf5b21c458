"""Records of runs: metrics as a table, the report, the list of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.recipes import checks_arguments, optional_text

if TYPE_CHECKING:
    import pyarrow as pa

    from hlat.reporting import RunComparison, RunOverview, RunSummary


@checks_arguments
def metrics(run: str | Path) -> "pa.Table":
    """Read the metrics of a run, which may be in progress, as a table.

    It is a ``pyarrow.Table``: ``.to_pandas()`` makes it a pandas.DataFrame, ``polars.from_arrow(table)`` one of polars.

    Args:
        run: run folder, or its metrics.jsonl.

    Returns:
        One row per logged step, ascending; no step twice: of repeated steps (after a resume) the last line counts, and
        an incomplete last line is ignored. Columns are the keys of metrics.jsonl; those of nested values have a dot, as
        ``seconds.forward``. Values that a step does not have are null.

    Raises:
        DataError: the run has no metrics, or a line is damaged.
        StorageError: the file cannot be read.
    """
    from hlat.tracking import metrics_table

    return metrics_table(Path(run))


@checks_arguments
def report(
    runs: str | Path | Sequence[str | Path],
    to: str | Path | None = None,
    *,
    cluster: str | None = None,
    price: str | None = None,
    hardware: str | Path | None = None,
) -> Path:
    """Write the report of a run, finished or not, as one HTML page that refers to no other file; return its path.

    Args:
        runs: run folder, or several to compare.
        to: the file; None for ``report.html`` in the first run's folder.
        cluster: machines that the runs were trained on, INSTANCE:N, for the plan beside actual and for dollars.
        price: kind of price: "on-demand", "capacity-block", "reserved", "spot" or "own"; None for the first known one.
        hardware: file with a catalog of chips and instances, on top of the one that ships with hlat.

    Raises:
        DataError: a folder is not that of a run, or a line of its metrics or events is damaged.
        StorageError: a file cannot be read or written.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        PlanError: there is no such kind of price.
    """
    from hlat.reporting import Machines, write_report

    folders = [runs] if isinstance(runs, (str, Path)) else list(runs)
    machines = None if cluster is None else Machines(cluster, price, optional_text(hardware))
    return write_report([Path(folder) for folder in folders], None if to is None else Path(to), machines)


@checks_arguments
def runs(folder: str | Path) -> "list[RunSummary]":
    """List the runs in a folder and below it.

    Args:
        folder: folder of runs, or of one run.

    Returns:
        A summary of each run: ``path``, ``state``, ``step``, ``total_steps``, ``loss``, ``validation_loss``,
        ``tokens_per_second``, ``updated``, ``tokens`` and ``parameters``; values that a run does not have are None.

    Raises:
        DataError: there is no such folder.
    """
    from hlat.reporting import list_runs

    return list_runs(Path(folder))


@checks_arguments
def show_run(run: str | Path) -> "RunOverview":
    """Read what a run has left in its folder: recipe, attempts, curve, last numbers, checkpoints.

    Args:
        run: its folder; the run may be in progress, or have died before its first step.

    Returns:
        ``status``, ``settings`` (the resolved recipe), ``attempts``, ``parameters``, ``loss`` (tokens and loss of each
        logged step), ``validation``, ``numbers`` and ``checkpoints``; ``to_dict()`` has everything as JSON values.

    Raises:
        DataError: it is not the folder of a run.
        StorageError: a file cannot be read.
    """
    from hlat.reporting import read_overview

    return read_overview(Path(run))


@checks_arguments
def compare_runs(runs: Sequence[str | Path]) -> "RunComparison":
    """Compare runs: fields in which their recipes differ, losses at the same tokens, last numbers.

    Args:
        runs: folders of runs.

    Returns:
        ``recipe`` (values by field), ``curve`` (tokens, losses) and ``runs``; ``to_dict()`` has JSON values.

    Raises:
        DataError: a folder is not that of a run.
        StorageError: a file cannot be read.
    """
    from hlat.reporting import compare_runs as compare

    return compare([Path(run) for run in runs])
