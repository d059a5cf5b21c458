"""Deadline of a run: the time to save and stop, before the scheduler ends the job.

recovery.deadline_seconds, counted by the supervisor --HLAT_DEADLINE--> deadline
end of the Slurm job --SLURM_JOB_END_TIME, squeue--> deadline, minus the time that a save takes

Time is counted on a monotonic clock, so setting the system clock during training changes nothing. The time of day is
read once, to convert the end time that Slurm reports.
"""

import os
import time
from collections.abc import Callable, Mapping

from hlat.config import RecoveryConfig
from hlat.runtime import slurm
from hlat.runtime.process.clock import machine_clock
from hlat.runtime.process.exit_codes import DEADLINE_ENV

_MIN_MARGIN = 60.0  # seconds left for the last save, at least
_SAVE_FACTOR = 2.0  # the margin as a multiple of the longest save so far


class Deadline:
    """Time to save and stop.

    Args:
        recovery: the recipe's ``recovery`` section.
        longest_save: returns the seconds that the longest save so far took until it was durable.
        environment: environment variables of this process.
        clock: seconds on a monotonic clock that all processes of the machine share.
        time_of_day: seconds since 1970.
    """

    def __init__(
        self,
        recovery: RecoveryConfig,
        longest_save: Callable[[], float],
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = machine_clock,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._longest_save, self._clock = longest_save, clock
        self._deadline = _number(environment.get(DEADLINE_ENV))
        if self._deadline is None and recovery.deadline_seconds is not None:  # no supervisor
            self._deadline = clock() + recovery.deadline_seconds
        end_of_job = slurm.job_end_time(environment)
        self._end_of_job = None if end_of_job is None else clock() + (end_of_job - time_of_day())

    @property
    def has_passed(self) -> bool:
        """True once it is time to save and stop."""
        now = self._clock()
        if self._deadline is not None and now >= self._deadline:
            return True
        if self._end_of_job is None:
            return False
        return now >= self._end_of_job - max(_MIN_MARGIN, _SAVE_FACTOR * self._longest_save())


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
