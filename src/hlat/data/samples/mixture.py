"""The source of every sample, by formula; each source is always within one sample of its share.

    weights of each phase --windows--> sequence of sources, stored for one period --> (source, index in the source)

After i samples a source with shares w_1, w_2, ... should have supplied T(i) = w_1 + ... + w_i of them. Its n-th sample
may come once T(i) is large enough, and must come before T(i) is too large: this is its window. With the windows of
Tijdeman 1980 ("The chairman assignment problem", Discrete Mathematics 32) a sequence always exists, and taking the
source whose window closes first finds it: each source is then within 1 - 1 / (2 K - 2) of T(i) after every i, for
K sources and shares that change as often as they like.

While the shares stay the same the sequence repeats, so a phase of 10^9 samples is stored as a table of one period,
and any position is found without replaying the samples before it. All arithmetic is in integers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
import numpy.typing as npt

from hlat.config import LONGEST_PERIOD

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PhaseWeights:
    """The weights of the sources in one phase.

    Attributes:
        weights: relative weight of each source; non-negative integers, not all zero.
        stop: the global sample before which the phase ends; None for no end.
    """

    weights: tuple[int, ...]
    stop: int | None = None

    @property
    def period(self) -> int:
        """Number of samples after which each source has supplied exactly its share."""
        return sum(self.weights)


@dataclass(frozen=True)
class _Segment:
    """A range of the sequence: a table, repeated until the next segment, or without end.

    Attributes:
        start: first global sample of the segment.
        before: samples of each source before the segment, int64, shape (sources,).
        sources: the table of sources.
        ranks: for each entry, the number of earlier entries of the same source in the table.
        totals: entries of each source in the table.
    """

    start: int
    before: Int64s
    sources: npt.NDArray[np.int32]
    ranks: Int64s = field(repr=False)
    totals: Int64s

    @classmethod
    def of(cls, start: int, before: Sequence[int], sources: Sequence[int]) -> "_Segment":
        """Build a segment from the counts before it and its table."""
        table = np.array(sources, dtype=np.int32)
        ranks = np.empty(len(table), dtype=np.int64)
        totals = np.zeros(len(before), dtype=np.int64)
        for source in range(len(before)):
            positions = np.flatnonzero(table == source)
            ranks[positions] = np.arange(len(positions))
            totals[source] = len(positions)
        return cls(start, np.array(before, dtype=np.int64), table, ranks, totals)


class Mixture:
    """The sequence of sources over the global samples.

    Args:
        phases: consecutive phases; the last one never ends.

    Attributes:
        sources: number of sources.

    Raises:
        ValueError: a phase ends before it begins, or the period of the weights exceeds ``LONGEST_PERIOD`` samples.
    """

    def __init__(self, phases: Sequence[PhaseWeights]) -> None:
        self.sources = len(phases[0].weights)
        self._segments = list(_segments(_Timeline(phases)))
        self._starts = np.array([segment.start for segment in self._segments], dtype=np.int64)

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Return the source of each global sample, and the number of earlier samples of that source; int64 each."""
        indexes = np.asarray(samples, dtype=np.int64)
        sources, ordinals = np.empty_like(indexes), np.empty_like(indexes)
        segments = np.searchsorted(self._starts, indexes, side="right") - 1
        for number in np.unique(segments):
            selected, segment = segments == number, self._segments[number]
            repetitions, positions = np.divmod(indexes[selected] - segment.start, len(segment.sources))
            chosen = segment.sources[positions]
            sources[selected] = chosen
            ordinals[selected] = (
                segment.before[chosen] + repetitions * segment.totals[chosen] + segment.ranks[positions]
            )
        return sources, ordinals

    def counts(self, samples: int) -> Int64s:
        """Return the number of samples of each source among the first ``samples``, shape (sources,)."""
        segment = self._segments[int(np.searchsorted(self._starts, samples, side="right")) - 1]
        repetitions, rest = divmod(samples - segment.start, len(segment.sources))
        partial = np.bincount(segment.sources[:rest], minlength=self.sources)
        return segment.before + repetitions * segment.totals + partial


class _Timeline:
    """T(i) of every source over all phases, as integers in units of 1 / ``unit`` samples."""

    def __init__(self, phases: Sequence[PhaseWeights]) -> None:
        self.starts, self.stops = [0], [phase.stop for phase in phases]
        for phase in phases[:-1]:
            if phase.stop is None or phase.stop <= self.starts[-1]:
                raise ValueError(f"a phase that begins at sample {self.starts[-1]} cannot end at {phase.stop}")
            self.starts.append(phase.stop)
        self.stops[-1] = None
        self.periods = [phase.period for phase in phases]
        count = len(phases[0].weights)
        self.slack = max(2 * count - 2, 1)
        self.unit = lcm(*self.periods) * self.slack
        self.rates = [[weight * (self.unit // phase.period) for weight in phase.weights] for phase in phases]
        self.targets_at_start = [[0] * count]  # T at the start of each phase, in units
        for start, stop, rates in zip(self.starts, self.starts[1:], self.rates, strict=False):
            self.targets_at_start.append(
                [done + rate * (stop - start) for done, rate in zip(self.targets_at_start[-1], rates, strict=True)]
            )

    def farthest_window(self, phase: int) -> int:
        """Samples within which the window of every source closes that has a share in a phase."""
        return max(2 * self.unit // rate for rate in self.rates[phase] if rate) + 2

    def first_reaching(self, source: int, level: int, phase: int) -> int | None:
        """Return the number of samples, from ``phase`` on, at which T of a source reaches ``level``; None for never."""
        for number in range(phase, len(self.starts)):
            start, stop, rate = self.starts[number], self.stops[number], self.rates[number][source]
            missing = level - self.targets_at_start[number][source]
            if missing <= 0:
                return start
            if rate:
                reached = start - (-missing // rate)
                if stop is None or reached <= stop:
                    return reached
        return None


class _Walk:
    """The sequence of sources, generated one sample after the other."""

    def __init__(self, timeline: _Timeline) -> None:
        self._timeline = timeline
        self.counts = [0] * len(timeline.targets_at_start[0])
        self._phase = 0
        self._opens: list[int | None] = []
        self._closes: list[int | None] = []

    def begin_phase(self, phase: int) -> None:
        """Continue with another phase, whose first sample is next."""
        self._phase = phase
        windows = [self._window(source) for source in range(len(self.counts))]
        self._opens, self._closes = [opens for opens, _ in windows], [closes for _, closes in windows]

    def _window(self, source: int) -> tuple[int | None, int | None]:
        """Return the earliest and the latest number of samples that may include the next sample of a source."""
        timeline, count = self._timeline, self.counts[source]
        margin = timeline.unit // timeline.slack if len(self.counts) > 1 else timeline.unit
        opens = timeline.first_reaching(source, count * timeline.unit + margin, self._phase)
        closes = timeline.first_reaching(source, (count + 1) * timeline.unit - margin + 1, self._phase)
        return opens, closes

    def take(self, done: int) -> int:
        """Append one sample to the sequence after ``done`` others; return its source."""
        best, soonest = -1, None
        for source, (opens, closes) in enumerate(zip(self._opens, self._closes, strict=True)):
            if opens is None or opens > done + 1:
                continue
            if best < 0 or (closes is not None and (soonest is None or closes < soonest)):
                best, soonest = source, closes
        assert best >= 0, "Tijdeman's theorem: some window is open"
        self.counts[best] += 1
        self._opens[best], self._closes[best] = self._window(best)
        return best

    def leads(self, done: int) -> tuple[int, ...]:
        """Return the lead of each source over its share, in units of the timeline.

        While the weights stay the same, the rest of the sequence depends only on these leads.
        """
        timeline, phase = self._timeline, self._phase
        elapsed = done - timeline.starts[phase]
        targets = zip(timeline.targets_at_start[phase], timeline.rates[phase], strict=True)
        return tuple(
            count * timeline.unit - target - rate * elapsed
            for count, (target, rate) in zip(self.counts, targets, strict=True)
        )


def _segments(timeline: _Timeline) -> Iterator[_Segment]:
    walk = _Walk(timeline)
    for phase in range(len(timeline.starts)):
        yield from _phase_segments(timeline, walk, phase)


def _phase_segments(timeline: _Timeline, walk: _Walk, phase: int) -> Iterator[_Segment]:
    """Yield the segments of a phase: up to the first repetition of the sequence, its repetition, and the phase's end.

    Near the end of a phase the weights of the next phase already matter: windows that close after it depend on them.
    """
    start, stop, period = timeline.starts[phase], timeline.stops[phase], timeline.periods[phase]
    repeats_until = None if stop is None else stop - timeline.farthest_window(phase)
    walk.begin_phase(phase)
    done, before, table = start, list(walk.counts), list[int]()
    seen: dict[tuple[int, ...], tuple[int, list[int]]] | None = {}
    while stop is None or done < stop:
        if seen is not None and (done - start) % period == 0:
            state = walk.leads(done)
            if state in seen:
                first, counts = seen[state]
                length = done - start - first
                repetitions = 0 if repeats_until is None else (repeats_until - done) // length
                if stop is None or repetitions > 0:
                    if first:
                        yield _Segment.of(start, before, table[:first])
                    yield _Segment.of(start + first, counts, table[first:])
                    if stop is None:
                        return
                    gains = [now - then for now, then in zip(walk.counts, counts, strict=True)]
                    walk.counts = [now + repetitions * gain for now, gain in zip(walk.counts, gains, strict=True)]
                    walk.begin_phase(phase)
                    start, before, table, seen = done + repetitions * length, list(walk.counts), [], None
                    done = start
                    continue
            seen.setdefault(state, (done - start, list(walk.counts)))
        if len(table) > 4 * LONGEST_PERIOD:
            raise ValueError(f"the weights repeat only after {period} samples")
        table.append(walk.take(done))
        done += 1
    if table:
        yield _Segment.of(start, before, table)
