"""Straggler detection: find ranks that work longer per step than the others.

heartbeats now and some steps ago --seconds of work per step--> one rank works much longer than the others --> Straggler

In lockstep every rank takes as long for a step as the slowest one; they differ in how much of it they wait for others.
A straggler is reported, never restarted: its cause (a throttled chip, another job on the machine) may pass, and a
restart would lose work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hlat.resilience.heartbeat import HeartbeatReading

_MIN_STEPS, _MIN_SECONDS = 5, 3.0  # of a window: stacks are sampled every 50 ms, too rarely to compare single steps
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_MIN_EXCESS = 0.1  # share of a step: twice as long as a negligible time delays no other rank
_RECOVERED = 0.8  # share of the factor below which a rank is no longer a straggler


@dataclass(frozen=True)
class Straggler:
    """A rank that works longer per step than the others."""

    rank: int
    factor: float  # its work per step, relative to the median of the others
    phase: str  # phase with the largest excess over the median of the others
    step: int  # last step of the window
    seconds: float  # seconds of work per step


@dataclass
class StragglerDetector:
    """Compares the ranks over windows of steps.

    Args:
        factor: a rank that works more than this many times as long as the others is a straggler.
    """

    factor: float
    _window_start: dict[int, HeartbeatReading] = field(default_factory=dict)
    _window_start_at: float = 0.0
    _stragglers: set[int] = field(default_factory=set)

    def check(self, heartbeats: Sequence[HeartbeatReading], now: float) -> list[Straggler]:
        """Return the stragglers that were not stragglers in the last window.

        Args:
            heartbeats: heartbeats of all ranks.
            now: seconds, on the clock of the heartbeats.
        """
        if len(heartbeats) < 2 or any(heartbeat.first_step_at is None for heartbeat in heartbeats):
            return []
        if not self._window_start:
            self._window_start, self._window_start_at = {heartbeat.rank: heartbeat for heartbeat in heartbeats}, now
            return []
        steps_done = [heartbeat.step - self._window_start[heartbeat.rank].step for heartbeat in heartbeats]
        if now - self._window_start_at < _MIN_SECONDS or min(steps_done) < _MIN_STEPS:
            return []
        work = {beat.rank: _work_per_step(self._window_start[beat.rank], beat) for beat in heartbeats}
        step_seconds = (now - self._window_start_at) / max(steps_done)
        steps = {heartbeat.rank: heartbeat.step for heartbeat in heartbeats}
        self._window_start, self._window_start_at = {heartbeat.rank: heartbeat for heartbeat in heartbeats}, now
        found = [self._check_rank(rank, work, steps[rank], step_seconds) for rank in work]
        return [straggler for straggler in found if straggler is not None]

    def _check_rank(
        self, rank: int, work: dict[int, dict[str, float]], step: int, step_seconds: float
    ) -> Straggler | None:
        own = sum(work[rank].values())
        others = {phase: median(work[other][phase] for other in work if other != rank) for phase in _PHASES}
        usual = median(sum(work[other].values()) for other in work if other != rank)
        factor = own / max(usual, 1e-6)
        if factor < _RECOVERED * self.factor:
            self._stragglers.discard(rank)
        if rank in self._stragglers or factor <= self.factor or own - usual < _MIN_EXCESS * step_seconds:
            return None
        self._stragglers.add(rank)
        phase = max(_PHASES, key=lambda name: work[rank][name] - others[name])
        return Straggler(rank, factor, phase, step, own)


def _work_per_step(first: HeartbeatReading, last: HeartbeatReading) -> dict[str, float]:
    """Return the seconds of work per step between two heartbeats of a rank, by phase."""
    steps = last.step - first.step
    return {phase: (last.busy.get(phase, 0.0) - first.busy.get(phase, 0.0)) / steps for phase in _PHASES}
