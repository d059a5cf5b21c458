"""Which rank is slow, judged from how long each works per step.

heartbeats now and some steps ago --seconds of work per step--> one works much longer than the others --> Slow

In lockstep all ranks take as long for a step as the slowest does; what differs is how much of it they wait for others.
A slow rank is reported, never restarted: what slows it (a throttled chip, a neighbour) may pass, and a restart would
cost work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hlat.resilience.heartbeat import Reading

_STEPS, _SECONDS = 5, 3.0  # that are looked back on at least: a look every 50 ms says nothing about one step
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_NOTICEABLE = 0.1  # of a step: a rank that is busy twice as long as others with next to nothing holds nobody up
_OVER = 0.8  # of the factor: below it an episode is over


@dataclass(frozen=True)
class Slow:
    """A rank that works longer than the others."""

    rank: int
    factor: float  # of the median of the others
    phase: str  # in which it works longest beyond them
    step: int  # of the last one looked at
    seconds: float  # of work per step


@dataclass
class Slowness:
    """Compares the ranks over windows of steps.

    Args:
        factor: how much longer a rank has to work than the others to be called slow.
    """

    factor: float
    _before: dict[int, Reading] = field(default_factory=dict)
    _at: float = 0.0
    _slow: set[int] = field(default_factory=set)

    def look(self, beats: Sequence[Reading], now: float) -> list[Slow]:
        """The ranks that are found slow now and were not before.

        Args:
            beats: of all ranks.
            now: seconds, the clock of the heartbeats.
        """
        if len(beats) < 2 or any(beat.first_step_at is None for beat in beats):
            return []
        if not self._before:
            self._before, self._at = {beat.rank: beat for beat in beats}, now
            return []
        if now - self._at < _SECONDS or min(beat.step - self._before[beat.rank].step for beat in beats) < _STEPS:
            return []
        work = {beat.rank: _work(self._before[beat.rank], beat) for beat in beats}
        step_seconds = (now - self._at) / max(beat.step - self._before[beat.rank].step for beat in beats)
        steps = {beat.rank: beat.step for beat in beats}
        self._before, self._at = {beat.rank: beat for beat in beats}, now
        return [found for rank in work if (found := self._judge(rank, work, steps[rank], step_seconds)) is not None]

    def _judge(self, rank: int, work: dict[int, dict[str, float]], step: int, step_seconds: float) -> Slow | None:
        own = sum(work[rank].values())
        others = {phase: median(work[other][phase] for other in work if other != rank) for phase in _PHASES}
        usual = median(sum(work[other].values()) for other in work if other != rank)
        factor = own / max(usual, 1e-6)
        if factor < _OVER * self.factor:
            self._slow.discard(rank)
        if rank in self._slow or factor <= self.factor or own - usual < _NOTICEABLE * step_seconds:
            return None
        self._slow.add(rank)
        phase = max(_PHASES, key=lambda name: work[rank][name] - others[name])
        return Slow(rank, factor, phase, step, own)


def _work(before: Reading, after: Reading) -> dict[str, float]:
    """Seconds of work per step, by phase."""
    steps = after.step - before.step
    return {phase: (after.busy.get(phase, 0.0) - before.busy.get(phase, 0.0)) / steps for phase in _PHASES}
