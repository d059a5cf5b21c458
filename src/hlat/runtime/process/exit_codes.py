"""The signals that ask a run to save and stop, and what it then ends with.

SIGTERM, SIGUSR1, the deadline  --> 75: the run is to be queued again
SIGINT, SIGHUP                  --> 128 + n: somebody wanted it to end
"""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What a run saves and stops on; SIGUSR1 is what Slurm is told to send before a job's time is over."""

REQUEUE_CODE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": the state is saved, and the same command goes on from there."""

DEADLINE_ENV = "HLAT_DEADLINE"
"""The environment variable of the time at which a run saves and stops, by ``machine_clock``."""

INTERRUPTED_MESSAGE = "interrupted: what was complete is kept, and the same command goes on from there"
"""What is said after Ctrl-C."""

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


def stop_exit_code(number: int) -> int:
    """The exit code of a run that was stopped by a signal."""
    return REQUEUE_CODE if number in _PREEMPTING else 128 + number


STOP_EXIT_CODES = tuple({stop_exit_code(number) for number in STOP_SIGNALS})
"""The exit codes of runs that were asked to stop and did."""
