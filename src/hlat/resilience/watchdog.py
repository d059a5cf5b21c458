"""Watchdog and straggler detector: find hanging ranks and slow ranks from the heartbeats of all ranks.

    heartbeats --time limit per phase, learned in this run--> a rank exceeds it --> rank that causes it --> Hang
    heartbeats now and some steps ago --seconds of work per step--> one rank works much longer than others --> Straggler

The time counts from the last progress in the phase. While a rank waits for its disk, or for a saver that lives, nothing
hangs, however long that takes.

A hanging rank makes all others wait, so their phases last too long as well. The cause is a rank that does not wait for
another one. If all wait, it is the one with the least progress. If all have made the same progress, it is the one that
waits at another location in the code.

In lockstep every rank takes as long for a step as the slowest one; they differ in how much of it they wait for others.
A straggler is reported, never restarted: its cause (a throttled chip, another job on the machine) may pass, and a
restart would lose work.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median

from hlat.resilience.heartbeat import HEARTBEAT_FOLDER, HeartbeatReading
from hlat.runtime.backend.faults import HangLimits
from hlat.runtime.terminal import listed

# Phases without time limit, in which text is prepared, checkpoints are loaded, and exports are waited for.
UNLIMITED = ("start", "end")

FIRST_TIME = 1800.0  # time limit of a phase in seconds until it has ended once: it may include compilation

_BACKSTOP = 300.0  # seconds that collectives wait longer than the watchdog, which says more
_LIMIT_FACTOR = 10.0  # time limit of a phase, in multiples of its longest duration
_LISTED_RANKS = 8  # ranks in a message, at most
_SILENCE_LIMIT = 5.0  # seconds without a sample of the main thread
_ORDER = ("device", "evaluation", "saving", "checkpoint", "data", "forward", "reduce", "optimizer")


@dataclass(frozen=True)
class Hang:
    """A hang, and the ranks that cause it: usually one."""

    ranks: list[int]
    phase: str
    step: int  # number of the current step, counted from 1
    seconds: float  # seconds since that phase began
    why: str

    def __str__(self) -> str:
        since = f"of step {self.step} for {self.seconds:.0f} s: {self.why}"
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} hangs in {self.phase} {since}"
        return f"ranks {listed(self.ranks)} hang in {self.phase} {since}"


@dataclass
class Watchdog:
    """Detector of hangs; it learns a time limit for each phase from the longest that has ended."""

    seconds: float | None  # smallest time limit of a phase; None disables the watchdog
    longest_phases: dict[str, float] = field(default_factory=dict)  # seconds of the longest of each phase

    def limit(self, phase: str) -> float | None:
        """Present time limit of a phase in seconds; None if it has none."""
        if self.seconds is None or phase in UNLIMITED:
            return None
        if phase == "saving":  # fed by the savers' progress: how long other saves took does not matter
            return self.seconds
        longest = self.longest_phases.get(phase)
        return max(self.seconds, FIRST_TIME if longest is None else _LIMIT_FACTOR * longest)

    def collective_limits(self, logs: Path) -> HangLimits:
        """Limits for collectives on devices; ``logs`` gets what their library says about a hang."""
        # Without a watchdog a collective may wait for a day.
        wait = (
            timedelta(days=1) if self.seconds is None else timedelta(seconds=max(self.seconds, FIRST_TIME) + _BACKSTOP)
        )
        beats = os.environ.get(HEARTBEAT_FOLDER)
        return HangLimits.of(wait, logs, None if beats is None else Path(beats))

    def check(
        self, heartbeats: Sequence[HeartbeatReading], now: float, is_stopped: Callable[[int], bool]
    ) -> Hang | None:
        """Learn from the phases that have ended, and return the hang if there is one; ``now`` on their clock."""
        for beat in heartbeats:
            for phase, longest in beat.longest.items():
                self.longest_phases[phase] = max(longest, self.longest_phases.get(phase, 0.0))
        late = [beat for beat in heartbeats if self._is_late(beat, now)]
        idle = [beat for beat in heartbeats if self.seconds is None or not beat.is_advancing(now, self.seconds)]
        if len(idle) < len(heartbeats):  # the others may wait for slow work, which goes on
            late = [beat for beat in late if not beat.waits_for_others]
        if not late:
            return None
        ranks, why = find_hanging_ranks(idle, now, is_stopped)
        first = next(beat for beat in heartbeats if beat.rank == ranks[0])
        return Hang(ranks, first.phase, first.current_step, now - first.since, why)

    def _is_late(self, beat: HeartbeatReading, now: float) -> bool:
        limit = self.limit(beat.phase)
        return limit is not None and now - beat.since > limit and not beat.is_advancing(now, limit)


def find_hanging_ranks(
    heartbeats: Sequence[HeartbeatReading], now: float, is_stopped: Callable[[int], bool]
) -> tuple[list[int], str]:
    """Return the ranks that cause a hang, and the reason in words."""
    # From the surest sign to the weakest; see the head of this module.
    if stopped := [beat for beat in heartbeats if is_stopped(beat.rank)]:
        return _ranks(stopped), "stopped by a signal"
    if silent := [beat for beat in heartbeats if now - beat.alive_at > _SILENCE_LIMIT]:
        return _ranks(silent), "does not respond: Python does not run there"
    if working := [beat for beat in heartbeats if not beat.waiting]:
        is_only_rank = len(heartbeats) == 1
        location = working[0].location
        return _ranks(working), location if is_only_rank else f"waits for no other rank, in {location}"
    lowest = min(progress_key(beat) for beat in heartbeats)
    behind = [beat for beat in heartbeats if progress_key(beat) == lowest]
    if len(behind) < len(heartbeats):
        return _ranks(behind), f"waits in {behind[0].location} while the others are ahead"
    locations = Counter(beat.location for beat in heartbeats)
    common, count = locations.most_common(1)[0]
    if len(locations) > 1 and count > len(heartbeats) / 2:
        elsewhere = [beat for beat in heartbeats if beat.location != common]
        return _ranks(elsewhere), f"waits in {elsewhere[0].location} while the others wait in {common}"
    described = ", ".join(f"rank {beat.rank} in {beat.location}" for beat in heartbeats[:_LISTED_RANKS])
    return _ranks(heartbeats), f"all ranks wait for one another: {described}"


def progress_key(beat: HeartbeatReading) -> tuple[int, int]:
    """A rank's progress as (step, phase index); forward and backward alternate, so they have one index."""
    phase = "forward" if beat.phase == "backward" else beat.phase
    return beat.step, _ORDER.index(phase) if phase in _ORDER else len(_ORDER)


def _ranks(heartbeats: Sequence[HeartbeatReading]) -> list[int]:
    return [beat.rank for beat in heartbeats]


_MIN_STEPS, _MIN_SECONDS = 5, 3.0  # of a window: stacks are sampled every 50 ms, too rarely to compare single steps
_WORK_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
_MIN_EXCESS = 0.1  # share of a step: twice as long as a negligible time delays no other rank
_RECOVERED_SHARE = 0.8  # share of the factor below which a rank is no longer a straggler


@dataclass(frozen=True)
class Straggler:
    """A rank that works longer per step than the others; ``factor`` is relative to their median."""

    rank: int
    factor: float  # its work per step, relative to the median of the others
    phase: str  # phase with the largest excess over the median of the others
    step: int  # last step of the window
    seconds: float  # seconds of work per step


@dataclass
class StragglerDetector:
    """Compares the ranks over windows of steps."""

    factor: float  # a rank that works more than this many times as long as the others is a straggler
    _window_start: dict[int, HeartbeatReading] = field(default_factory=dict)
    _window_start_at: float = 0.0
    _stragglers: set[int] = field(default_factory=set)

    def check(self, heartbeats: Sequence[HeartbeatReading], now: float) -> list[Straggler]:
        """Return the stragglers that were not stragglers in the last window; ``now`` is on the heartbeats' clock."""
        if len(heartbeats) < 2 or any(heartbeat.first_step_at is None for heartbeat in heartbeats):
            return []
        last = {beat.rank: beat for beat in heartbeats}
        first, seconds = self._window_start or last, now - self._window_start_at
        steps_done = [beat.step - first[beat.rank].step for beat in heartbeats]
        if self._window_start and (seconds < _MIN_SECONDS or min(steps_done) < _MIN_STEPS):
            return []
        self._window_start, self._window_start_at = last, now
        if first is last:  # the first window begins
            return []
        work = {beat.rank: _work_per_step(first[beat.rank], beat) for beat in heartbeats}
        found = [self._check_rank(rank, work, beat.step, seconds / max(steps_done)) for rank, beat in last.items()]
        return [straggler for straggler in found if straggler is not None]

    def _check_rank(
        self, rank: int, work: dict[int, dict[str, float]], step: int, step_seconds: float
    ) -> Straggler | None:
        own = sum(work[rank].values())
        others = {phase: median(work[other][phase] for other in work if other != rank) for phase in _WORK_PHASES}
        usual = median(sum(work[other].values()) for other in work if other != rank)
        # The others may do nothing measurable in such a window.
        factor = own / max(usual, 1e-6)
        # Below the threshold by a margin: else a rank at the threshold is reported again and again.
        if factor < _RECOVERED_SHARE * self.factor:
            self._stragglers.discard(rank)
        if rank in self._stragglers or factor <= self.factor or own - usual < _MIN_EXCESS * step_seconds:
            return None
        self._stragglers.add(rank)
        phase = max(_WORK_PHASES, key=lambda name: work[rank][name] - others[name])
        return Straggler(rank, factor, phase, step, own)


def _work_per_step(first: HeartbeatReading, last: HeartbeatReading) -> dict[str, float]:
    """Seconds of work per step between two heartbeats of a rank, by phase."""
    steps = last.step - first.step
    return {phase: (last.busy.get(phase, 0.0) - first.busy.get(phase, 0.0)) / steps for phase in _WORK_PHASES}
