"""The time by which a run has to have saved, so that it stops before somebody stops it.

recovery.deadline_seconds, counted by the supervisor --HLAT_DEADLINE--> that moment
the end of the Slurm job --SLURM_JOB_END_TIME--> that moment, less the time that saving takes
"""

import os
import time
from collections.abc import Callable, Mapping

from hlat.config import RecoveryConfig
from hlat.runtime import DEADLINE

_MARGIN = 60.0  # seconds that are left for the last save at least
_TIMES = 2.0  # of the longest save so far


class Deadline:
    """Whether it is time to save and stop.

    Args:
        recovery: of the recipe.
        longest_save: seconds that the longest save so far has taken until it was durable.
        environment: what whoever started this process has set.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        recovery: RecoveryConfig,
        longest_save: Callable[[], float],
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._longest_save, self._clock = longest_save, clock
        self._own = _number(environment.get(DEADLINE))
        if self._own is None and recovery.deadline_seconds is not None:  # nobody supervises
            self._own = clock() + recovery.deadline_seconds
        self._end_of_job = _number(environment.get("SLURM_JOB_END_TIME"))

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
