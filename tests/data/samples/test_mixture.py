"""Sources are mixed to within one sample of their shares at every prefix, and any position is found by formula."""

from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hlat.config.recipe_rules import whole_weights
from hlat.data.samples.order import EpochOrder, Mixture, PhaseWeights

_weights = st.integers(1, 6).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, 40), min_size=count, max_size=count).filter(any), min_size=1, max_size=4
    )
)
_lengths = st.lists(st.integers(1, 700), min_size=4, max_size=4)


def _phases(weights: list[list[int]], lengths: list[int]) -> list[PhaseWeights]:
    stops = np.cumsum(lengths[: len(weights) - 1]).tolist()
    return [
        PhaseWeights(tuple(phase_weights), stop) for phase_weights, stop in zip(weights, [*stops, None], strict=True)
    ]


@given(weights=_weights, lengths=_lengths)
@settings(deadline=None)
def test_every_prefix_is_within_one_sample_of_the_shares(weights: list[list[int]], lengths: list[int]) -> None:
    """Across phases too: the bound is Tijdeman's, 1 - 1 / (2 K - 2) for K sources, computed in exact fractions."""
    phases, count = _phases(weights, lengths), len(weights[0])
    samples = sum(lengths)
    sources, ordinals = Mixture(phases).locate(np.arange(samples))
    bound = 1 - Fraction(1, 2 * count - 2) if count > 1 else Fraction(0)
    given_so_far, target = [0] * count, [Fraction(0)] * count
    for sample, (source, ordinal) in enumerate(zip(sources.tolist(), ordinals.tolist(), strict=True)):
        phase = next(p for p in phases if p.stop is None or sample < p.stop)
        target = [t + Fraction(w, sum(phase.weights)) for t, w in zip(target, phase.weights, strict=True)]
        assert ordinal == given_so_far[source]
        given_so_far[source] += 1
        assert all(abs(have - want) <= bound for have, want in zip(given_so_far, target, strict=True))


@given(weights=_weights, lengths=_lengths, position=st.integers(0, 10**12), data=st.data())
@settings(deadline=None)
def test_any_position_is_found_without_replaying_the_samples_before(
    weights: list[list[int]], lengths: list[int], position: int, data: st.DataObject
) -> None:
    mixture = Mixture(_phases(weights, [length * 1000 for length in lengths]))
    sources, ordinals = mixture.locate(np.arange(position, position + 50))
    before = mixture.counts(position).tolist()
    assert sum(before) == position
    for source, ordinal in zip(sources.tolist(), ordinals.tolist(), strict=True):
        assert ordinal == before[source]
        before[source] += 1
    assert mixture.counts(position + 50).tolist() == before
    offset = data.draw(st.integers(0, 49))
    assert [int(x[0]) for x in mixture.locate([position + offset])] == [sources[offset], ordinals[offset]]


@given(weights=_weights, lengths=st.lists(st.integers(1, 150), min_size=4, max_size=4))
@example(weights=[[1, 1], [0, 1], [2, 3]], lengths=[3, 20, 30, 1])  # the last phase must supply the missing half sample
@example(weights=[[7, 0, 9], [4, 4, 0], [0, 4, 3]], lengths=[28, 41, 12, 26])  # no repetition up to a phase's end
@settings(deadline=None, max_examples=25)
def test_the_sequence_equals_one_computed_sample_by_sample(weights: list[list[int]], lengths: list[int]) -> None:
    """The reference has no segments and no repetition, and uses exact fractions (Tijdeman 1980).

    Of the sources whose window is open it takes the one that closes first, of several the first source. A phase must
    stop repeating before windows reach into the next phase.
    """
    phases, samples = _phases(weights, lengths), sum(lengths)
    assert Mixture(phases).locate(np.arange(samples))[0].tolist() == _sequence_sample_by_sample(phases, samples)


def _sequence_sample_by_sample(phases: list[PhaseWeights], samples: int) -> list[int]:
    count, starts = len(phases[0].weights), [0, *(phase.stop for phase in phases[:-1])]
    margin = Fraction(1, 2 * count - 2) if count > 1 else Fraction(1)
    horizon = samples + 40 * count * 40  # the window of a source with a share is at most 2 / share samples long
    # Samples that each source should have supplied, by number of samples.
    targets = [[Fraction(0)] for _ in range(count)]
    for sample in range(horizon):
        phase = next(p for p in phases if p.stop is None or sample < p.stop)
        for target, weight in zip(targets, phase.weights, strict=True):
            target.append(target[-1] + Fraction(weight, sum(phase.weights)))
    given_so_far, found = [0] * count, list[int]()
    for sample in range(samples):
        phase_start = max(start for start in starts if start <= sample)
        windows = []
        for source, (target, done) in enumerate(zip(targets, given_so_far, strict=True)):
            closes = bisect_right(target, done + 1 - margin)  # first number of samples that exceeds it
            if target[sample + 1] >= done + margin:
                windows.append((max(closes, phase_start), source))
        source = min(windows)[1]
        found.append(source)
        given_so_far[source] += 1
    return found


def test_the_two_mixtures_of_hlat_over_its_complete_run() -> None:
    """1.8 T tokens in samples of 4096: HLAT-70B's mixture of the last 400 B (paper, table III) after another one."""
    early, late = whole_weights([67.0, 15.0, 18.0]), whole_weights([35.47, 41.27, 23.26])
    change, end = 1_400_000_000_000 // 4096, 1_800_000_000_000 // 4096
    mixture = Mixture([PhaseWeights(early, change), PhaseWeights(late)])
    for position, shares, start in ((change, early, 0), (end, late, change)):
        gained = mixture.counts(position) - mixture.counts(start)
        target = np.array(shares) / sum(shares) * (position - start)
        assert np.abs(gained - target).max() < 2  # the error is below one sample at either end


def test_weights_are_converted_exactly_to_integers() -> None:
    assert whole_weights([35.47, 41.27, 23.26]) == (3547, 4127, 2326)
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([1, 1, 1]) == (1, 1, 1)
    assert whole_weights([0, 3e-05]) == (0, 1)


def test_weights_with_too_long_a_period_are_refused() -> None:
    with pytest.raises(ValueError, match="only after 1000003 samples"):
        Mixture([PhaseWeights((1, 1_000_002))])


@given(
    items=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    repeats=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.25]), min_size=4, max_size=4),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_item_occurs_as_often_as_its_list_is_repeated(
    items: list[int], repeats: list[float], seed: int, shuffle: bool, epoch: int
) -> None:
    repeats = repeats[: len(items)]
    order = EpochOrder(items, repeats, seed, shuffle)
    assert order.epoch_length == sum(int(n * times) for n, times in zip(items, repeats, strict=True))
    if not order.epoch_length:
        return
    found = order.items(epoch * order.epoch_length + np.arange(order.epoch_length))
    seen = np.bincount(found, minlength=sum(items))
    for number, (n, times) in enumerate(zip(items, repeats, strict=True)):
        start = sum(items[:number])
        counts = seen[start : start + n]
        assert counts.sum() == int(n * times)
        assert n == 0 or (counts.min() >= int(times) and counts.max() <= int(times) + (times % 1 > 0))


def test_each_epoch_takes_another_part_of_a_list_of_which_it_takes_a_part() -> None:
    """Half of 60 items a time: two draws without replacement are equal once in 60!/30!^2 = 10^17 pairs."""
    order = EpochOrder([60, 7], [0.5, 1.0], 3, shuffle=True)
    parts = [frozenset(order.items(epoch * 37 + np.arange(37)).tolist()) for epoch in range(6)]
    assert len(set(parts)) == 6 and all(set(range(60, 67)) < part for part in parts)
