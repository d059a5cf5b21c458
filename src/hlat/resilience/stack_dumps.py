"""Where every thread of a rank is, asked from outside, also of one that hangs with Python's lock in its hand.

supervisor --SIGUSR2--> faulthandler in each rank --> a file beside its heartbeat --> the supervisor's report
"""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASK = signal.SIGUSR2
"""The signal that asks a rank for its stacks."""


def stacks_path(folder: Path, rank: int) -> Path:
    """Where the stacks of a rank lie, once it was asked."""
    return folder / f"rank-{rank:05d}.stacks"


@contextmanager
def stacks_on_demand(path: Path) -> Iterator[None]:
    """Have the stacks of all threads written to a file whenever this process is asked.

    Raises:
        OSError: the file cannot be made.
    """
    with path.open("w") as file:
        faulthandler.register(ASK, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(ASK)


def main_stack(stacks: str) -> str:
    """Of what a rank has written, the part about the thread that computes: the eldest one stands last."""
    return stacks.strip().rpartition("\n\n")[2]
