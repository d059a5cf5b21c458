"""The order of samples, by formula: global sample -> source, n-th sample of it -> its row or block.

    global sample g --Mixture--> (source, n); each source always within one sample of its share
    position n --> epoch n // N, offset n % N --permute--> p in [0, N) --> list, repetition, item      (EpochOrder)
    data section --build_mixture--> Mixture; limits on repeating a source

**Mixture.** After i samples a source with shares w_1, w_2, ... should have supplied T(i) = w_1 + ... + w_i of them. Its
n-th sample may come once T(i) is large enough, and must come before T(i) is too large: this is its window. With the
windows of Tijdeman 1980 ("The chairman assignment problem", Discrete Mathematics 32) a sequence always exists. Taking
the source whose window closes first finds it. Each source is then within 1 - 1 / (2 K - 2) of T(i) after every i, for K
sources and shares that change as often as they like. All arithmetic is in integers.

While the shares stay the same the sequence repeats. So a phase of 10^9 samples is stored as a table of one period, and
any position is found without replaying the samples before it.

**Epochs.** N is the sum of the lists' repeated lengths. Items are rows of prepared data, or blocks of files where text
is tokenized during training. A list with repeats 2.5 occurs twice in full in each epoch, and a different half of it
once more.

**Permutation.** A balanced Feistel network permutes the numbers of an even number of bits, whatever its round function
is (Luby and Rackoff 1988). A number outside [0, n) is permuted again until it falls inside, which leaves a permutation
of [0, n) ("cycle walking", Black and Rogaway 2002). The domain has fewer than 4 n numbers, or 64 for tiny n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from hlat.config import LONGEST_PERIOD, DataConfig, whole_weights
from hlat.runtime.errors import DataError
from hlat.runtime.random_keys import stream_key

_ROUNDS = 8
_LEAST_HALF_BITS = 3
_TABLE_HALF_BITS = 5
# Multipliers of the finaliser of MurmurHash3 (Appleby), which mixes 64 bits.
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_33 = np.uint64(33)


def permute(seed: int, epoch: int, index: npt.ArrayLike, n: int) -> npt.NDArray[np.int64]:
    """Return the value at each index of the permutation of [0, n) that belongs to (seed, epoch).

    int64, the shape of ``index``, which is in [0, n), else IndexError. Over all of [0, n) each value occurs once.
    """
    values = np.asarray(index, dtype=np.int64)
    if values.size and not (values.min() >= 0 and values.max() < n):
        raise IndexError(f"indices must be in [0, {n})")
    half = max(_LEAST_HALF_BITS, (max(n - 1, 1).bit_length() + 1) // 2)  # n up to 2**62
    keys = [np.uint64(stream_key(seed, "order", epoch, round)) for round in range(_ROUNDS)]
    out = values.astype(np.uint64).ravel()
    outside = np.arange(out.size)
    # A small domain is permuted completely in one step: cycle walking over a few numbers takes dozens of steps.
    table = _feistel(np.arange(1 << 2 * half, dtype=np.uint64), half, keys) if half <= _TABLE_HALF_BITS else None
    while outside.size:
        out[outside] = _feistel(out[outside], half, keys) if table is None else table[out[outside]]
        outside = outside[out[outside] >= np.uint64(n)]
    return out.astype(np.int64).reshape(values.shape)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = (word ^ (word >> _33)) * _MIX_1
    word = (word ^ (word >> _33)) * _MIX_2
    return word ^ (word >> _33)


Int64s = npt.NDArray[np.int64]

_CHUNK, _CACHED_CHUNKS = 1 << 12, 16


class EpochOrder:
    """An endless sequence of epochs in which every item occurs as often as its list is repeated.

    The fraction of a list's ``repeats`` selects that fraction of its items. Without ``shuffle``, lists come one after
    the other. ``epoch_length`` is N, the positions per epoch.
    """

    def __init__(self, items: Sequence[int], repeats: Sequence[float], seed: int, shuffle: bool) -> None:
        self._items = np.array(items, dtype=np.int64)
        lengths = np.array([int(n * times) for n, times in zip(items, repeats, strict=True)], dtype=np.int64)
        self._ends = np.cumsum(lengths)
        self._starts, self._offsets = self._ends - lengths, np.cumsum(self._items) - self._items
        self._full_repeats = lengths // np.maximum(self._items, 1)  # how often a list occurs in full in an epoch
        self._seed, self._shuffle = seed, shuffle
        self.epoch_length = int(self._ends[-1])
        self._cached: dict[tuple[int, int], Int64s] = {}

    def items(self, positions: npt.ArrayLike) -> Int64s:
        """Return the item at each position, numbered over all lists: int64, the shape of ``positions``."""
        indexes = np.asarray(positions, dtype=np.int64)
        epochs, offsets = np.divmod(indexes, self.epoch_length)
        out = np.empty_like(indexes)
        for epoch in np.unique(epochs):
            selected = epochs == epoch
            order = self._order(int(epoch), offsets[selected]) if self._shuffle else offsets[selected]
            out[selected] = self._items_of_epoch(int(epoch), order)
        return out

    def _order(self, epoch: int, offsets: Int64s) -> Int64s:
        out = np.empty_like(offsets)
        # In cached chunks, because permuting a few numbers takes as long as permuting many.
        for chunk in np.unique(offsets // _CHUNK).tolist():
            if (epoch, chunk) not in self._cached:
                if len(self._cached) >= _CACHED_CHUNKS:
                    self._cached.clear()
                chunk_offsets = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.epoch_length))
                self._cached[epoch, chunk] = permute(self._seed, epoch, chunk_offsets, self.epoch_length)
            selected = offsets // _CHUNK == chunk
            out[selected] = self._cached[epoch, chunk][offsets[selected] % _CHUNK]
        return out

    def _items_of_epoch(self, epoch: int, offsets: Int64s) -> Int64s:
        """Map permuted offsets of one epoch to items."""
        lists = np.searchsorted(self._ends, offsets, side="right")
        copies, items = np.divmod(offsets - self._starts[lists], self._items[lists])
        for number in np.unique(lists):
            partial = (lists == number) & (copies == self._full_repeats[number])
            if partial.any() and self._shuffle:  # select a different fraction of the list each epoch
                seed = stream_key(self._seed, "part of a list", int(number))
                items[partial] = permute(seed, epoch, items[partial], int(self._items[number]))
        return self._offsets[lists] + items


@dataclass(frozen=True)
class PhaseWeights:
    """The weights of the sources in one phase, as whole numbers."""

    weights: tuple[int, ...]  # relative weight of each source; non-negative integers, not all zero
    stop: int | None = None  # the global sample before which the phase ends; None for no end

    @property
    def period(self) -> int:
        """Number of samples after which each source has supplied exactly its share."""
        return sum(self.weights)


class _Segment:
    """A range of the sequence: a table of sources, repeated until the next segment, or without end."""

    def __init__(self, start: int, before: Sequence[int], sources: Sequence[int]) -> None:
        self.start = start  # first global sample of the segment
        self.before = np.array(before, dtype=np.int64)  # samples of each source before the segment, shape (sources,)
        self.sources = np.array(sources, dtype=np.int32)  # the table
        self.totals = np.bincount(self.sources, minlength=len(before))  # entries of each source in the table
        # For each entry, the number of earlier entries of the same source in the table.
        self.ranks = np.empty(len(sources), dtype=np.int64)
        for source, total in enumerate(self.totals.tolist()):
            self.ranks[self.sources == source] = np.arange(total)


class Mixture:
    """The sequence of sources over the global samples; the last phase never ends.

    ValueError if a phase ends before it begins, or the weights repeat only after ``LONGEST_PERIOD`` samples.
    """

    def __init__(self, phases: Sequence[PhaseWeights]) -> None:
        self.sources = len(phases[0].weights)  # number of sources
        timeline = _Timeline(phases)
        walk = _Walk(timeline)
        self._segments = [part for phase in range(len(phases)) for part in _phase_segments(timeline, walk, phase)]
        self._starts = np.array([segment.start for segment in self._segments], dtype=np.int64)

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Return the source of each global sample, and the earlier samples of that source; int64."""
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
        self.slack = max(2 * count - 2, 1)  # Tijdeman's bound is 1 - 1 / (2 K - 2)
        self.unit = lcm(*self.periods) * self.slack
        self.rates = [[weight * (self.unit // phase.period) for weight in phase.weights] for phase in phases]
        self.targets_at_start = [[0] * count]  # T at the start of each phase, in units
        for start, stop, rates in zip(self.starts, self.starts[1:], self.rates, strict=False):
            self.targets_at_start.append(
                [done + rate * (stop - start) for done, rate in zip(self.targets_at_start[-1], rates, strict=True)]
            )

    def farthest_window(self, phase: int) -> int:
        """Return the samples within which the window of every source of a phase closes."""
        return max(2 * self.unit // rate for rate in self.rates[phase] if rate) + 2

    def first_reaching(self, source: int, level: int, phase: int) -> int | None:
        """Return after how many samples T of a source reaches ``level``; None for never."""
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
        self._windows: list[tuple[int | None, int | None]] = []  # of each source

    def begin_phase(self, phase: int) -> None:
        """Continue with another phase, whose first sample is next."""
        self._phase = phase
        self._windows = [self._window(source) for source in range(len(self.counts))]

    def _window(self, source: int) -> tuple[int | None, int | None]:
        """Return the least and the greatest number of samples that may include a source's next sample."""
        timeline, count = self._timeline, self.counts[source]
        margin = timeline.unit // timeline.slack if len(self.counts) > 1 else timeline.unit
        opens = timeline.first_reaching(source, count * timeline.unit + margin, self._phase)
        closes = timeline.first_reaching(source, (count + 1) * timeline.unit - margin + 1, self._phase)
        return opens, closes

    def take(self, done: int) -> int:
        """Append one sample to the sequence after ``done`` others; return its source."""
        best, soonest = -1, None
        for source, (opens, closes) in enumerate(self._windows):
            if opens is None or opens > done + 1:
                continue
            if best < 0 or (closes is not None and (soonest is None or closes < soonest)):
                best, soonest = source, closes
        assert best >= 0, "Tijdeman's theorem: some window is open"
        self.counts[best] += 1
        self._windows[best] = self._window(best)
        return best

    def leads(self, done: int) -> tuple[int, ...]:
        """Return the lead of each source over its share, in units of the timeline."""
        timeline, phase = self._timeline, self._phase
        # While the weights stay the same, the rest of the sequence depends only on these leads.
        elapsed = done - timeline.starts[phase]
        targets = zip(timeline.targets_at_start[phase], timeline.rates[phase], strict=True)
        return tuple(
            count * timeline.unit - target - rate * elapsed
            for count, (target, rate) in zip(self.counts, targets, strict=True)
        )


def _phase_segments(timeline: _Timeline, walk: _Walk, phase: int) -> Iterator[_Segment]:
    """Yield the segments of a phase: up to the first repetition, the repetition, the phase's end."""
    start, stop, period = timeline.starts[phase], timeline.stops[phase], timeline.periods[phase]
    # Near the end of a phase the next weights already matter: windows that close after it depend on them.
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
                        yield _Segment(start, before, table[:first])
                    yield _Segment(start + first, counts, table[first:])
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
        yield _Segment(start, before, table)


def is_weighted(config: DataConfig) -> bool:
    """Return True if sources are mixed by weights instead of forming one corpus."""
    return bool(config.phases) or any(source.weight is not None for source in config.sources)


def build_mixture(config: DataConfig) -> Mixture | None:
    """Return the mixture, None without weights; DataError if a phase has no sample of its own."""
    return Mixture(phase_weights(config)) if is_weighted(config) else None


def phase_weights(config: DataConfig) -> list[PhaseWeights]:
    """Return the weights, phase by phase; DataError if a phase has no sample of its own."""
    if not config.phases:
        return [PhaseWeights(whole_weights([source.weight or 0.0 for source in config.sources]))]
    phases, before = [], 0
    for index, phase in enumerate(config.phases):
        last = index == len(config.phases) - 1
        stop = None if phase.until_tokens is None or last else int(phase.until_tokens // config.sequence_length)
        if stop is not None and stop <= before:
            raise DataError(
                f"data.phases.{index}.until_tokens = {phase.until_tokens:,.0f}: the phase begins at sample {before} "
                f"and has none of its own: a sample takes data.sequence_length = {config.sequence_length} tokens."
            )
        weights = [phase.weights.get(source.label, 0.0) for source in config.sources]
        phases.append(PhaseWeights(whole_weights(weights), stop))
        before = stop or 0
    return phases


def is_ever_sampled(config: DataConfig, source: int) -> bool:
    """Return True if any sample can come from a source, given by index."""
    return is_weighted(config) and any(phase.weights[source] for phase in phase_weights(config))


def refuse_too_many_epochs(config: DataConfig, needed: Sequence[int], rows: Sequence[int]) -> None:
    """Raise DataError if a run needs more samples of a source than ``max_epochs`` of its rows."""
    problems = []
    for source, need, available in zip(config.sources, needed, rows, strict=True):
        limit = None if source.max_epochs is None else int(source.max_epochs * available)
        if limit is not None and need > limit:
            length = config.sequence_length
            problems.append(
                f"source {source.label}: the run takes {need * length:,} tokens of it, {need / max(available, 1):.2f} "
                "passes; "
                f"max_epochs = {source.max_epochs:g} of its {available * length:,} tokens are {limit * length:,}: "
                f"{(need - limit) * length:,} too few. Give it more text or a smaller weight, raise max_epochs, or "
                "train for fewer tokens."
            )
    if problems:
        raise DataError("\n".join(problems))
