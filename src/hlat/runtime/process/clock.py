"""A monotonic clock that all processes of a machine share."""

import time


def machine_clock() -> float:
    """Seconds of a monotonic clock that all processes of this machine share. Its zero has no meaning.

    On Linux (CLOCK_BOOTTIME) it also advances while the machine sleeps.
    """
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)
