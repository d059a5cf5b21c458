"""Ranks of ``hlat train --nproc N`` forked from the command, which has imported hlat, instead of N new interpreters.

    hlat train --nproc 2 (forked from the tests' server) --fork--> rank 0, rank 1, each in its own session

Each rank is a process of its own, with the environment, error report, signals and exit code that the launcher gives its
ranks. What tests/launch and tests/faults prove about starting and killing processes, they prove on new interpreters.
"""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from hlat.launch import training_job
from hlat.launch.local_processes import ForkedWorker, RankPlaces, launch_forked, open_store, rank_environment
from hlat.launch.supervision import local_run
from hlat.runtime.distributed.network import RUN_SECRET_ENV


class ForkedRanks:
    """Forked ranks as one process set."""

    def __init__(self, workers: Sequence[ForkedWorker]) -> None:
        self._workers = workers

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: worker.pids[0] for rank, worker in enumerate(self._workers)}

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank; None while it runs."""
        return self._workers[rank].poll(0)

    def error_file(self, rank: int) -> Path:
        """Path of a rank's error report."""
        return self._workers[rank].error_file(0)


@contextmanager
def fork_ranks(
    command: Sequence[str],
    nproc: int,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[ForkedRanks]:
    """Launch ranks as ``launch_multiprocess`` does, but forked from this process, on whose streams they print."""
    assert show is None
    words = command[command.index("hlat") + 1 :]
    shared = {RUN_SECRET_ENV: secrets.token_hex(32), **environment}
    with open_store() as port, ExitStack() as stack:
        workers = []
        for rank in range(nproc):
            own = {
                **rank_environment(rank, RankPlaces(0, nproc, nproc, 0, "127.0.0.1", port)),
                **shared,
            }
            reports = folder / str(rank)
            reports.mkdir()
            workers.append(stack.enter_context(launch_forked(partial(_run, words), own, reports)))
        yield ForkedRanks(workers)


def _run(words: Sequence[str]) -> int:
    from hlat.command import main  # noqa: PLC0415

    sys.argv = ["hlat", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def install() -> None:
    """Let this process fork the ranks of its runs."""
    for module in (training_job, local_run):  # which have imported the function by its name
        vars(module)["launch_multiprocess"] = fork_ranks
