"""Whether a run that failed is started again, when, and with how many processes.

    a failure, the newest state that is safe --Restarts--> again after some seconds, or given up
                                             --Sizes-----> with how many processes

What the user has to put right is never tried again. What may have been chance is, as long as it gets anywhere: so many
failures in a row that bring no new checkpoint end it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["signal", "exception", "passing", "exit", "hang", "user"]
"""What a failure was: a process was killed, raised a bug's exception, met an error that may pass (a disk that refused),
ended without a word, hung, or met something that only the user can put right."""

_LONGEST = 60.0  # seconds


@dataclass(frozen=True)
class Failure:
    """What ended an attempt."""

    kind: Kind
    rank: int
    trained: bool  # whether a step had begun, in this attempt or one before
    began: int | None  # the step that it went on from, if it came so far
    saved: int | None  # the newest step that it is known to have made safe

    @property
    def is_fault(self) -> bool:
        """Whether another attempt may fare better.

        What is raised before the first step, by a disk or by the program, would be raised again.
        """
        return self.trained if self.kind in ("passing", "exception") else self.kind != "user"


@dataclass(frozen=True)
class Decision:
    """What is done about a failure."""

    restart: bool
    seconds: float  # to wait before
    reason: str


class Restarts:
    """Counts failures in a row that bring nothing new.

    Args:
        limit: so many restarts in a row may bring no new checkpoint.
        backoff: seconds before the first of them; doubled with each, up to a minute.
    """

    def __init__(self, limit: int, backoff: float) -> None:
        self._limit, self._backoff = limit, backoff
        self.newest = -1  # step that is known to be safe
        self.in_row = 0

    def after(self, failure: Failure) -> Decision:
        """Decide about a failure."""
        self._note_progress(failure)
        if not failure.is_fault:
            return Decision(False, 0.0, "this is not a matter of chance")
        if self.in_row >= self._limit:
            tried = f"{self.in_row} restarts in a row brought no new checkpoint" if self.in_row else "no restarts"
            return Decision(False, 0.0, f"given up: {tried} (recovery.restarts={self._limit})")
        seconds = min(self._backoff * 2**self.in_row, max(_LONGEST, self._backoff))
        self.in_row += 1
        return Decision(True, seconds, f"restart {self.in_row} of {self._limit} without a new checkpoint")

    def begin_anew(self) -> None:
        """Forget the failures in a row: something else is tried."""
        self.in_row = 0

    def _note_progress(self, failure: Failure) -> None:
        """See whether a state newer than any before became safe, by what is known of this attempt."""
        known = max((step for step in (failure.began, failure.saved) if step is not None), default=-1)
        if known > self.newest:
            self.newest = known
            self.in_row = 0


class Sizes:
    """With how many processes a run goes on, where it may be several numbers.

    Args:
        least: how few are enough.
        most: how many it begins with.
        fits: whether the recipe's layout can be that of so many.
    """

    def __init__(self, least: int, most: int, fits: Callable[[int], bool]) -> None:
        self._least, self._fits = least, fits
        self.now = most
        self._suspect: int | None = None

    def after(self, failure: Failure, progress: bool) -> bool:
        """Take a smaller number if the same rank has been lost twice with nothing in between.

        Its machine or chip may be broken. An exception speaks of the program, which would fail on fewer ranks too.

        Returns:
            Whether ``now`` has changed.
        """
        lost = failure.kind in ("signal", "hang")
        again = lost and not progress and failure.rank == self._suspect
        self._suspect = failure.rank if lost else None
        smaller = [size for size in range(self.now - 1, self._least - 1, -1) if self._fits(size)] if again else []
        if not smaller:
            return False
        self.now, self._suspect = smaller[0], None
        return True
