"""How long the threads of GNU OpenMP, torch's on a CPU, spin before they sleep: settled before torch is imported.

/proc/stat before and after the first imports -> is the host of this virtual machine busy? -> GOMP_SPINCOUNT
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

SPIN_COUNT = 20_000
"""Turns that a waiting thread spins, about a millisecond, unless the host is busy."""

STOLEN_SHARE = 0.1
"""Share of the wanted processor time that counts as a busy host. A start takes about 30 ticks: three of them."""


@dataclass(frozen=True)
class ProcessorTime:
    """Ticks of all processors since the machine was started (proc(5))."""

    used: int  # by anything in this machine
    stolen: int  # wanted by this machine, while the host of a virtual machine ran something else

    @classmethod
    def read(cls, file: Path = Path("/proc/stat")) -> "ProcessorTime | None":
        """Read the ticks so far; None where the system does not tell them."""
        try:
            first = file.read_text(encoding="ascii").partition("\n")[0]
            user, nice, system, _, _, hard, soft, stolen = (int(word) for word in first.split()[1:9])
        except (OSError, ValueError):
            return None
        return cls(user + nice + system + hard + soft, stolen)


def set_spin_count(
    before: ProcessorTime | None, after: ProcessorTime | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set GOMP_SPINCOUNT, which torch's libgomp reads when it is loaded; a value that is there stays.

    A thread that spins for long takes its core from other programs in this machine: with one of two cores busy,
    training has twice the speed with 20,000 turns that it has with the library's own 300,000. On a quiet machine it
    has 3 to 8 % less, and where the host of a virtual machine is busy 6 to 26 %: a core that sleeps is given away and
    comes back late. So the library's own value stays where the host has been seen to take time away
    (docs/experiments.md has the measurements).

    Args:
        before: ticks when the command began.
        after: ticks after a part of its start.
        environment: of this process.
    """
    if before is not None and after is not None:
        stolen, used = after.stolen - before.stolen, after.used - before.used
        if stolen > STOLEN_SHARE * (stolen + used):
            return
    environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
