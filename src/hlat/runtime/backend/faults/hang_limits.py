"""Agreement between the detection of hangs and the library of collectives, and the dumps of that library.

    detector: patience, prefixes of files --HangLimits--> library of a rank
        hang found --request_dumps--> pipe of each rank --> library --> dump files
        a collective waits longer than that ----------------> library -----^
    dump files --collect_dumps--> folder of the incident

Supervisors use this module, which does not import torch.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

_DUMP, _PIPE = "collectives-rank-", "dump-"  # torch appends the rank, and ".pipe" to names of pipes


@dataclass(frozen=True)
class HangLimits:
    """Limits and files for the library that communicates between devices.

    Attributes:
        patience: longest time that a collective may wait for other ranks; longer than it takes to detect a hang, so
            that a hang ends with the verdict of the detector, which knows the rank to blame. None for torch's default.
        dumps: prefix of the files into which the library writes what each rank waits for.
        requests: prefix of named pipes; who writes to one gets the dump of that rank.
    """

    patience: timedelta | None = None
    dumps: Path | None = None
    requests: Path | None = None

    @classmethod
    def of(cls, patience: timedelta | None, logs: Path, pipes: Path | None) -> "HangLimits":
        """Make the limits of a process whose dumps go to a folder of logs; None for pipes where nobody asks."""
        return cls(patience, logs / _DUMP, None if pipes is None else pipes / _PIPE)


def request_dumps(pipes: Path) -> bool:
    """Ask the libraries of all ranks of this machine for dumps, which they write within about a second.

    Args:
        pipes: folder of the pipes.

    Returns:
        True if there is a library that listens.
    """
    asked = False
    for pipe in pipes.glob(f"{_PIPE}*.pipe"):
        with suppress(OSError):  # its process has ended
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                asked = os.write(descriptor, b"1") > 0 or asked
            finally:
                os.close(descriptor)
    return asked


def collect_dumps(logs: Path) -> Path | None:
    """Move the dumps in a folder of logs into a folder of their own, so that the next attempt keeps them.

    Returns:
        That folder; None if there is no dump, or the disk refuses.
    """
    with suppress(OSError):
        dumps = sorted(logs.glob(f"{_DUMP}*"))
        if dumps:
            numbers = (path.name.removeprefix("incident-") for path in logs.glob("incident-*"))
            number = 1 + max(
                (int(text) for text in numbers if text.isdecimal()), default=0
            )  # not of archives made of one
            folder = logs / f"incident-{number:04d}"
            folder.mkdir()
            for dump in dumps:
                dump.rename(folder / dump.name)
            return folder
    return None
