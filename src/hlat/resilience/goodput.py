"""Where the time of a run went, from the start of the command to its end; the parts add up to the whole.

    productive  steps that count: those that a checkpoint secured, or that the run finished with
    saving      training stood still for a save
    lost        steps that have to be done again, and the time until a failure was noticed and cleared away
    starting    until the first step of the first attempt; the end of processes that end well
    recovering  until the first step of a later attempt
    waiting     for data, and before a restart

What was lost is known once the next attempt says from which step it went on.
"""

from dataclasses import dataclass
from itertools import pairwise

from hlat.resilience.heartbeat import Reading

PARTS = ("productive", "saving", "lost", "starting", "recovering", "waiting")


@dataclass(frozen=True)
class _Unsecured:
    """Productive seconds of an attempt that failed, and which steps they were spent on."""

    began: int
    step: int
    saved: int | None
    saved_seconds: float
    seconds: float

    def kept(self, newest: int | None) -> float:
        """Seconds of the steps up to the newest one that was secured: read off between what is known."""
        if newest is None or newest <= self.began:
            return 0.0
        points = [(self.began, 0.0), (self.step, self.seconds)]
        if self.saved is not None and self.began < self.saved < self.step:
            points.insert(1, (self.saved, self.saved_seconds))
        for (low, before), (high, after) in pairwise(points):
            if newest <= high and high > low:
                return before + (after - before) * (newest - low) / (high - low)
        return self.seconds


class Goodput:
    """The account.

    Args:
        now: when the command began; seconds of the heartbeats' clock, as all times here.
    """

    def __init__(self, now: float) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._until = now
        self._attempts = 0
        self._unsecured: _Unsecured | None = None

    def waited(self, now: float) -> None:
        """Nothing ran until now."""
        self._seconds["waiting"] += now - self._until
        self._until = now

    def ended(self, now: float, beat: Reading | None, failed: bool) -> None:
        """An attempt ran until now.

        Args:
            now: when its processes were gone.
            beat: of its first rank; None if that never came so far.
            failed: whether it did not end of its own accord.
        """
        opening = "recovering" if self._attempts else "starting"
        self._attempts += 1
        if beat is None or beat.first_step_at is None or beat.began is None:
            self._seconds[opening] += now - self._until
            self._until = now
            return
        self._settle(beat.began)
        saving, waiting = beat.seconds.get("checkpoint", 0.0), beat.seconds.get("data", 0.0)
        opened = beat.first_step_at - self._until
        self._seconds[opening] += opened
        self._seconds["saving"] += saving
        self._seconds["waiting"] += waiting
        self._seconds["productive"] += beat.productive
        rest = now - self._until - opened - saving - waiting - beat.productive
        self._seconds["lost" if failed else "starting"] += rest
        self._until = now
        if failed:
            self._unsecured = _Unsecured(beat.began, beat.step, beat.saved, beat.saved_seconds, beat.productive)

    def totals(self) -> dict[str, float]:
        """Seconds by part so far; what is not known yet is taken from the newest save that was heard of."""
        account = Goodput(self._until)
        account._seconds, account._unsecured = dict(self._seconds), self._unsecured
        if self._unsecured is not None:
            account._settle(self._unsecured.saved)
        return account._seconds

    def _settle(self, newest: int | None) -> None:
        """The run goes on from this step: the steps after it were lost."""
        if self._unsecured is None:
            return
        kept = self._unsecured.kept(newest)
        self._seconds["productive"] -= self._unsecured.seconds - kept
        self._seconds["lost"] += self._unsecured.seconds - kept
        self._unsecured = None
