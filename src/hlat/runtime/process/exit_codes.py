"""Signals that ask a run to save and stop, and the exit codes that follow.

SIGTERM, SIGUSR1, the deadline  --> 75: queue the run again
SIGINT, SIGHUP                  --> 128 + n: a person ended it
"""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals on which a run saves and stops. Slurm can send SIGUSR1 before a job's time limit."""

REQUEUE_CODE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": the state is saved, and the same command resumes from it."""

DEADLINE_ENV = "HLAT_DEADLINE"
"""Environment variable with the time at which a run saves and stops, in seconds of ``machine_clock``."""

INTERRUPTED_MESSAGE = "interrupted: completed work is kept; the same command goes on from there, or begins anew"
"""Message that is printed after Ctrl-C."""

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


def stop_exit_code(number: int) -> int:
    """Exit code of a run that was stopped by signal ``number``."""
    return REQUEUE_CODE if number in _PREEMPTING else 128 + number


STOP_EXIT_CODES = tuple({stop_exit_code(number) for number in STOP_SIGNALS})
"""Exit codes of runs that saved and stopped on request."""
