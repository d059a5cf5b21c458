"""Stack dumps of all threads of a rank, requested by a signal; they work even if a thread hangs holding the GIL.

supervisor --SIGUSR2--> faulthandler in each rank --> file next to its heartbeat --> the supervisor's hang report

faulthandler says nothing when it has finished. It writes the main thread last, outermost frame at the end: each rank
records that frame when it starts, and a dump that ends with it is whole.
"""

import faulthandler
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a rank dumps its stacks; sent to its main thread, it shows where that was stopped."""

# The last line of a stack of more than 100 frames. If another thread's is as deep, the main thread's may be missed.
_CUT = "  ..."


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's stack dumps."""
    return folder / f"rank-{rank:05d}.stacks"


def _outermost_path(path: Path) -> Path:
    return path.with_suffix(".outermost")


@contextmanager
def dump_stacks_on_signal(path: Path) -> Iterator[None]:
    """Inside the block, dump the stacks of all threads to a file at every ``STACKS_SIGNAL``.

    To be called by the main thread.

    Raises:
        OSError: the file cannot be created.
    """
    outermost = _outermost_path(path)
    with outermost.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=False)
    outermost.write_text(outermost.read_text(errors="replace").splitlines()[-1])
    with path.open("w") as file:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)


def read_stacks(folder: Path, rank: int) -> str:
    """Return a rank's stack dumps as far as they are written, from the folder of heartbeats."""
    return _read(stacks_path(folder, rank))


def has_stacks(folder: Path, rank: int) -> bool:
    """Return True if a rank has completely written its stacks to the folder of heartbeats."""
    path = stacks_path(folder, rank)
    outermost = _read(_outermost_path(path))
    last = _read(path).rpartition("\n")[0].rpartition("\n")[2]  # a line without its end may be half of one
    return outermost != "" and (_place(last) == _place(outermost) or last == _CUT)


def main_thread_stack(stacks: str) -> str:
    """Return the main thread's stack from a dump; faulthandler writes it last."""
    return stacks.strip().rpartition("\n\n")[2]


def _place(line: str) -> str:
    """Return a line of a stack without its line number: the outermost frame goes on, too."""
    return re.sub(r", line \d+ in ", " in ", line)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
