"""Seconds by which the processes of a machine count together."""

import time


def machine_clock() -> float:
    """Seconds of a clock that all processes of this machine share and nobody sets; its zero means nothing.

    Where the system has one (Linux: CLOCK_BOOTTIME) it goes on while the machine sleeps.
    """
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)
