"""Which source each sample is from: never more than one sample away from the shares asked for, and by formula.

    shares of each phase --windows--> the sequence of sources, laid out once per period --> (source, its how-manieth)

After i samples a source with shares w_1, w_2, ... should have given T(i) = w_1 + ... + w_i of them. Its n-th sample
must come when T has grown enough for it and before T has grown too much. With the windows of Tijdeman 1980 ("The
chairman assignment problem", Discrete Mathematics 32) there is always a sequence, and taking the source whose window
closes first finds it: each source is then within 1 - 1 / (2 K - 2) of T(i) after every i, for K sources and shares
that change as often as they like.

Where the shares stay the same the sequence repeats, so that a phase of 10^9 samples is a table of one period, and any
place in it is found without going through what lies before. All arithmetic is in whole numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
import numpy.typing as npt

from hlat.config.rules import LONGEST_PERIOD

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PhaseWeights:
    """The shares of a phase.

    Attributes:
        weights: of each source, in relation to one another; whole numbers, not all zero.
        stop: the global sample before which the phase ends; None for never.
    """

    weights: tuple[int, ...]
    stop: int | None = None

    @property
    def period(self) -> int:
        """Samples after which each source has had exactly its share."""
        return sum(self.weights)


@dataclass(frozen=True)
class _Segment:
    """A stretch of the sequence: a table, repeated without end or until the next segment.

    Attributes:
        start: its first global sample.
        before: samples of each source before it.
        sources: the table.
        ranks: for each entry, how many entries of the same source stand before it in the table.
        totals: entries of each source in the table.
    """

    start: int
    before: Int64s
    sources: npt.NDArray[np.int32]
    ranks: Int64s = field(repr=False)
    totals: Int64s

    @classmethod
    def of(cls, start: int, before: Sequence[int], sources: Sequence[int]) -> "_Segment":
        table = np.array(sources, dtype=np.int32)
        ranks = np.empty(len(table), dtype=np.int64)
        totals = np.zeros(len(before), dtype=np.int64)
        for source in range(len(before)):
            places = np.flatnonzero(table == source)
            ranks[places] = np.arange(len(places))
            totals[source] = len(places)
        return cls(start, np.array(before, dtype=np.int64), table, ranks, totals)


class Mixture:
    """The sequence of sources over the global samples.

    Args:
        phases: one after the other; the last one goes on for ever.

    Raises:
        ValueError: phases that end before they begin, or shares that come out even only after more than
            ``LONGEST_PERIOD`` samples.
    """

    def __init__(self, phases: Sequence[PhaseWeights]) -> None:
        self.sources = len(phases[0].weights)
        self._segments = list(_segments(_Timeline(phases)))
        self._starts = np.array([segment.start for segment in self._segments], dtype=np.int64)

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The source of each global sample, and how many samples of that source come before it."""
        asked = np.asarray(samples, dtype=np.int64)
        sources, ordinals = np.empty_like(asked), np.empty_like(asked)
        which = np.searchsorted(self._starts, asked, side="right") - 1
        for number in np.unique(which):
            here, segment = which == number, self._segments[number]
            turns, places = np.divmod(asked[here] - segment.start, len(segment.sources))
            found = segment.sources[places]
            sources[here] = found
            ordinals[here] = segment.before[found] + turns * segment.totals[found] + segment.ranks[places]
        return sources, ordinals

    def counts(self, samples: int) -> Int64s:
        """Samples of each source among the first ``samples``, shape (sources,)."""
        segment = self._segments[int(np.searchsorted(self._starts, samples, side="right")) - 1]
        turns, rest = divmod(samples - segment.start, len(segment.sources))
        partial = np.bincount(segment.sources[:rest], minlength=self.sources)
        return segment.before + turns * segment.totals + partial


class _Timeline:
    """T of every source, in units of 1 / ``unit``, so that all is whole numbers."""

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
        self.begun = [[0] * count]  # T at the start of each phase
        for start, stop, rates in zip(self.starts, self.starts[1:], self.rates, strict=False):
            self.begun.append([done + rate * (stop - start) for done, rate in zip(self.begun[-1], rates, strict=True)])

    def farthest_window(self, phase: int) -> int:
        """Samples within which the window of every source closes that has a share in a phase."""
        return max(2 * self.unit // rate for rate in self.rates[phase] if rate) + 2

    def first_reaching(self, source: int, level: int, phase: int) -> int | None:
        """The least number of samples, not before a phase, after which T of a source is at least ``level``."""
        for number in range(phase, len(self.starts)):
            start, stop, rate = self.starts[number], self.stops[number], self.rates[number][source]
            missing = level - self.begun[number][source]
            if missing <= 0:
                return start
            if rate:
                reached = start - (-missing // rate)
                if stop is None or reached <= stop:
                    return reached
        return None


class _Walk:
    """The sequence, one sample after the other."""

    def __init__(self, timeline: _Timeline) -> None:
        self._timeline = timeline
        self.counts = [0] * len(timeline.begun[0])
        self._phase = 0
        self._opens: list[int | None] = []
        self._closes: list[int | None] = []

    def enter(self, phase: int) -> None:
        """Go on with another phase, whose first sample is next."""
        self._phase = phase
        both = [self._window(source) for source in range(len(self.counts))]
        self._opens, self._closes = [opens for opens, _ in both], [closes for _, closes in both]

    def _window(self, source: int) -> tuple[int | None, int | None]:
        """The number of samples with which the next one of a source may come at the earliest and at the latest."""
        timeline, given = self._timeline, self.counts[source]
        least = timeline.unit // timeline.slack if len(self.counts) > 1 else timeline.unit
        opens = timeline.first_reaching(source, given * timeline.unit + least, self._phase)
        closes = timeline.first_reaching(source, (given + 1) * timeline.unit - least + 1, self._phase)
        return opens, closes

    def take(self, done: int) -> int:
        """The source of the sample after ``done`` others."""
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

    def ahead(self, done: int) -> tuple[int, ...]:
        """How far each source is from its share; what comes next depends on this alone while shares stay the same."""
        timeline, phase = self._timeline, self._phase
        elapsed = done - timeline.starts[phase]
        targets = zip(timeline.begun[phase], timeline.rates[phase], strict=True)
        return tuple(
            count * timeline.unit - begun - rate * elapsed
            for count, (begun, rate) in zip(self.counts, targets, strict=True)
        )


def _segments(timeline: _Timeline) -> Iterator[_Segment]:
    walk = _Walk(timeline)
    for phase in range(len(timeline.starts)):
        yield from _phase_segments(timeline, walk, phase)


def _phase_segments(timeline: _Timeline, walk: _Walk, phase: int) -> Iterator[_Segment]:
    """The segments of a phase: up to where the sequence begins to repeat, its repetition, and its end.

    Near its end the next phase's shares already matter: windows that close after it depend on them.
    """
    start, stop, period = timeline.starts[phase], timeline.stops[phase], timeline.periods[phase]
    repeats_until = None if stop is None else stop - timeline.farthest_window(phase)
    walk.enter(phase)
    done, before, table = start, list(walk.counts), list[int]()
    seen: dict[tuple[int, ...], tuple[int, list[int]]] | None = {}
    while stop is None or done < stop:
        if seen is not None and (done - start) % period == 0:
            state = walk.ahead(done)
            if state in seen:
                first, counts = seen[state]
                length = done - start - first
                turns = 0 if repeats_until is None else (repeats_until - done) // length
                if stop is None or turns > 0:
                    if first:
                        yield _Segment.of(start, before, table[:first])
                    yield _Segment.of(start + first, counts, table[first:])
                    if stop is None:
                        return
                    gained = [now - then for now, then in zip(walk.counts, counts, strict=True)]
                    walk.counts = [now + turns * gain for now, gain in zip(walk.counts, gained, strict=True)]
                    walk.enter(phase)
                    start, before, table, seen = done + turns * length, list(walk.counts), [], None
                    done = start
                    continue
            seen.setdefault(state, (done - start, list(walk.counts)))
        if len(table) > 4 * LONGEST_PERIOD:
            raise ValueError(f"the shares come out even only after {period} samples")
        table.append(walk.take(done))
        done += 1
    if table:
        yield _Segment.of(start, before, table)
