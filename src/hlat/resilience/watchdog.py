"""Which rank hangs, judged from the heartbeats of all of them.

    heartbeats --limits of the run's own making--> somebody is too long in a phase --> who holds up whom --> Hang

One rank that hangs makes all others wait, and their phases last too long as well. Those who do not wait for another
rank are the cause; where all wait, the one that has come least far; where all have come as far, the one that waits
somewhere else.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hlat.resilience.heartbeat import Reading

UNLIMITED = ("start", "end")
"""Phases that may take any time: text is prepared, states are loaded, the last save is waited for."""

FIRST_TIME = 1800.0
"""Seconds that a phase may last before it has ended once: blocks are compiled in it."""

_TIMES = 10.0
_NAMED = 8  # ranks, where all are to be named
_SILENT = 5.0  # seconds without a sign of life
_ORDER = ("device", "evaluation", "checkpoint", "data", "forward", "reduce", "optimizer")


@dataclass(frozen=True)
class Hang:
    """Who hangs: usually one rank."""

    ranks: list[int]
    phase: str
    step: int  # at work, counted from 1
    seconds: float  # since that phase began
    why: str


@dataclass
class Watchdog:
    """Limits that learn, and the verdict.

    Args:
        seconds: that every phase may last, however short it was before; None finds no hang.
    """

    seconds: float | None
    _longest: dict[str, float] = field(default_factory=dict)

    def limit(self, phase: str) -> float | None:
        """Seconds that a phase may last by now; None for any time."""
        if self.seconds is None or phase in UNLIMITED:
            return None
        known = self._longest.get(phase)
        return max(self.seconds, FIRST_TIME if known is None else _TIMES * known)

    def look(self, beats: Sequence[Reading], now: float, is_stopped: Callable[[int], bool]) -> Hang | None:
        """Learn from what has ended, and say who hangs, if somebody does.

        Args:
            beats: of the ranks that have one.
            now: seconds, the clock of the heartbeats.
            is_stopped: whether a process, by id, was stopped by a signal.
        """
        for beat in beats:
            for phase, longest in beat.longest.items():
                self._longest[phase] = max(longest, self._longest.get(phase, 0.0))
        if not any(self._is_late(beat, now) for beat in beats):
            return None
        ranks, why = blame(beats, now, is_stopped)
        worst = next(beat for beat in beats if beat.rank == ranks[0])
        return Hang(ranks, worst.phase, worst.step_at_work, now - worst.since, why)

    def _is_late(self, beat: Reading, now: float) -> bool:
        limit = self.limit(beat.phase)
        return limit is not None and now - beat.since > limit


def blame(beats: Sequence[Reading], now: float, is_stopped: Callable[[int], bool]) -> tuple[list[int], str]:
    """The ranks that hold up the others, and how one knows."""
    if stopped := [beat for beat in beats if is_stopped(beat.pid)]:
        return _ranks(stopped), "stopped by a signal"
    if silent := [beat for beat in beats if now - beat.alive_at > _SILENT]:
        return _ranks(silent), "gives no sign of life: Python does not run there"
    if working := [beat for beat in beats if not beat.waiting]:
        alone = len(beats) == 1
        return _ranks(working), f"{working[0].where}" if alone else f"waits for no other rank, in {working[0].where}"
    least = min(progress(beat) for beat in beats)
    behind = [beat for beat in beats if progress(beat) == least]
    if len(behind) < len(beats):
        return _ranks(behind), f"waits in {behind[0].where} while the others are further on"
    places = Counter(beat.where for beat in beats)
    common, count = places.most_common(1)[0]
    if len(places) > 1 and count > len(beats) / 2:
        elsewhere = [beat for beat in beats if beat.where != common]
        return _ranks(elsewhere), f"waits in {elsewhere[0].where} while the others wait in {common}"
    named = ", ".join(f"rank {beat.rank} in {beat.where}" for beat in beats[:_NAMED])
    return _ranks(beats), f"all ranks wait for one another: {named}"


def progress(beat: Reading) -> tuple[int, int]:
    """How far a rank has come. Micro-batches go forward and backward in turn, so these two are one place."""
    phase = "forward" if beat.phase == "backward" else beat.phase
    return beat.step, _ORDER.index(phase) if phase in _ORDER else len(_ORDER)


def _ranks(beats: Sequence[Reading]) -> list[int]:
    return [beat.rank for beat in beats]
