"""Several processes of one command that are started once: no restarts, no checkpoints to wait for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hlat.launch.local_ranks import LocalRanks
from hlat.launch.supervision.root_cause import RunOutcome, find_root_cause
from hlat.launch.supervision.wait import SignalForwarder, wait_for_processes


def run_processes(
    arguments: Sequence[str], nproc: int, folder: Path, show: Callable[[str], None] | None = None
) -> RunOutcome:
    """Run ``hlat`` with the same arguments in several processes on this machine, and wait for their end.

    Args:
        arguments: arguments of the command.
        nproc: number of processes.
        folder: folder of their results, which may have logs.
        show: receives the lines that they print; None prints them on the streams of this process.
    """
    from hlat.launch.multiprocess_launcher import hlat_command, launch_multiprocess  # noqa: PLC0415  (imports torch)

    with (
        SignalForwarder() as stops,
        TemporaryDirectory(prefix="hlat-launch-") as reports,
        launch_multiprocess(hlat_command(arguments), nproc, {}, Path(reports), show) as workers,
    ):
        ranks = LocalRanks(workers, Path(reports))
        exits = wait_for_processes(ranks, stops)
        ranks.end_leftovers(0.0, lambda: True)
    return find_root_cause(exits, stops.received, folder)
