"""Stack dumps of all threads of a rank, requested by a signal; they work even if a thread hangs holding the GIL.

supervisor --SIGUSR2--> faulthandler in each rank --> file next to its heartbeat --> the supervisor's hang report
"""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a rank dumps its stacks."""


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's stack dumps."""
    return folder / f"rank-{rank:05d}.stacks"


@contextmanager
def dump_stacks_on_signal(path: Path) -> Iterator[None]:
    """Inside the block, dump the stacks of all threads to a file at every ``STACKS_SIGNAL``.

    Raises:
        OSError: the file cannot be created.
    """
    with path.open("w") as file:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)


def main_thread_stack(stacks: str) -> str:
    """Return the main thread's stack from a dump; faulthandler writes it last."""
    return stacks.strip().rpartition("\n\n")[2]
