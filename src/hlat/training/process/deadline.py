"""The time by which a run has to have saved, so that it stops before somebody stops it.

recovery.deadline_seconds, counted by the supervisor --HLAT_DEADLINE--> that moment
the end of the Slurm job --SLURM_JOB_END_TIME, squeue--> that moment, less the time that saving takes

A clock that is set while the run trains changes nothing: time is counted by one that nobody sets. The time of day is
looked at once, for what another machine has written down in it.
"""

import os
import time
from collections.abc import Callable, Mapping

from hlat.config.sections import RecoveryConfig
from hlat.runtime import slurm
from hlat.runtime.process import DEADLINE_ENV, machine_clock

_MARGIN = 60.0  # seconds that are left for the last save at least
_TIMES = 2.0  # of the longest save so far


class Deadline:
    """Whether it is time to save and stop.

    Args:
        recovery: of the recipe.
        longest_save: seconds that the longest save so far has taken until it was durable.
        environment: what whoever started this process has set.
        clock: seconds that only go forward, the same clock in all processes of the machine.
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
        self._own = _number(environment.get(DEADLINE_ENV))
        if self._own is None and recovery.deadline_seconds is not None:  # nobody supervises
            self._own = clock() + recovery.deadline_seconds
        end_of_job = slurm.job_end_time(environment)
        self._end_of_job = None if end_of_job is None else clock() + (end_of_job - time_of_day())

    @property
    def has_come(self) -> bool:
        """Whether it is time."""
        now = self._clock()
        if self._own is not None and now >= self._own:
            return True
        if self._end_of_job is None:
            return False
        return now >= self._end_of_job - max(_MARGIN, _TIMES * self._longest_save())


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
