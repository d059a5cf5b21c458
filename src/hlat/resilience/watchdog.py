"""Watchdog: find hanging ranks from the heartbeats of all ranks.

    heartbeats --time limit per phase, learned in this run--> a rank exceeds it --> rank that causes it --> Hang

The time counts from the last progress in the phase. While a rank waits for its disk, or for a saver that lives, nothing
hangs, however long that takes.

A hanging rank makes all others wait, so their phases last too long as well. The cause is a rank that does not wait for
another one. If all wait, it is the one with the least progress. If all have made the same progress, it is the one that
waits at another location in the code.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from hlat.resilience.heartbeat import HEARTBEAT_FOLDER, HeartbeatReading
from hlat.runtime.backend.faults.hang_limits import HangLimits

UNLIMITED = ("start", "end")
"""Phases without time limit, in which text is prepared, checkpoints are loaded, and exports are waited for."""

FIRST_TIME = 1800.0
"""Time limit of a phase in seconds until it has ended once; the first time includes compilation."""

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


@dataclass
class Watchdog:
    """Detector of hangs; it learns a time limit for each phase.

    Args:
        seconds: smallest time limit of a phase; None disables the watchdog.
        longest_phases: seconds of the longest of each phase that has ended, from which the limits are learned.
    """

    seconds: float | None
    longest_phases: dict[str, float] = field(default_factory=dict)

    def limit(self, phase: str) -> float | None:
        """Return the present time limit of a phase in seconds; None if it has none."""
        if self.seconds is None or phase in UNLIMITED:
            return None
        if phase == "saving":  # fed by the savers' progress: how long other saves took does not matter
            return self.seconds
        longest = self.longest_phases.get(phase)
        return max(self.seconds, FIRST_TIME if longest is None else _LIMIT_FACTOR * longest)

    def collective_limits(self, logs: Path) -> HangLimits:
        """Return what the watchdog asks of collectives on devices, for a process of a run.

        Without a watchdog a collective may wait for a day.

        Args:
            logs: folder for what the library of collectives says about a hang.
        """
        wait = (
            timedelta(days=1) if self.seconds is None else timedelta(seconds=max(self.seconds, FIRST_TIME) + _BACKSTOP)
        )
        beats = os.environ.get(HEARTBEAT_FOLDER)
        return HangLimits.of(wait, logs, None if beats is None else Path(beats))

    def check(
        self, heartbeats: Sequence[HeartbeatReading], now: float, is_stopped: Callable[[int], bool]
    ) -> Hang | None:
        """Learn from the phases that have ended, and return the hang if there is one.

        Args:
            heartbeats: heartbeats of the ranks that have one.
            now: seconds, on the clock of the heartbeats.
            is_stopped: returns True if the process of this rank is stopped by a signal.
        """
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
    """Return a rank's progress as (step, phase index); forward and backward alternate, so they have one index."""
    phase = "forward" if beat.phase == "backward" else beat.phase
    return beat.step, _ORDER.index(phase) if phase in _ORDER else len(_ORDER)


def _ranks(heartbeats: Sequence[HeartbeatReading]) -> list[int]:
    return [beat.rank for beat in heartbeats]
