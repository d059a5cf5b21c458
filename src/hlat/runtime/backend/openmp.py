"""Spin count of GNU OpenMP, which torch uses on a CPU: how long idle threads spin before they sleep.

It must be set before torch is imported:

/proc/stat before and after the first imports -> is the host of this virtual machine busy? -> GOMP_SPINCOUNT
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

SPIN_COUNT = 20_000  # iterations that a waiting thread spins, about a millisecond, unless the host is busy

STOLEN_SHARE = 0.1
"""Stolen share of the requested processor time from which a host counts as busy.

A start of the command takes about 30 ticks, so this is three of them.
"""


@dataclass(frozen=True)
class ProcessorTime:
    """Ticks of all processors since the machine booted (proc(5))."""

    used: int  # ticks used by anything on this machine
    stolen: int  # ticks that this virtual machine requested while its host ran something else

    @classmethod
    def read(cls, file: Path = Path("/proc/stat")) -> "ProcessorTime | None":
        """Read the ticks so far; None if the system does not provide them."""
        try:
            first = file.read_text(encoding="ascii").partition("\n")[0]
            user, nice, system, _, _, hard, soft, stolen = (int(word) for word in first.split()[1:9])
        except (OSError, ValueError):
            return None
        return cls(user + nice + system + hard + soft, stolen)


def set_spin_count(
    before: ProcessorTime | None, after: ProcessorTime | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set GOMP_SPINCOUNT, which libgomp reads when it is loaded; an existing value is kept."""
    # A spinning thread takes its core from other programs: with one of two cores busy, training is twice as fast with
    # 20,000 iterations as with the default of 300,000. On a quiet machine that is 3 to 8 % slower, and on a virtual
    # machine whose host is busy 6 to 26 %, as a core that sleeps is given away and returns late: there the default
    # stays (docs/notebook/cpu-settings.md).
    if before is not None and after is not None:
        stolen, used = after.stolen - before.stolen, after.used - before.used
        if stolen > STOLEN_SHARE * (stolen + used):
            return
    environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
