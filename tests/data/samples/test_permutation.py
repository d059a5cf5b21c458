"""The order of samples is a bijection by formula at any size, and statistically random."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.data.samples.order import permute

_seeds = st.integers(0, 2**63 - 1)


@given(n=st.integers(1, 5000), seed=_seeds, epoch=st.integers(0, 100))
@settings(deadline=None)
def test_every_index_occurs_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(seed, epoch, np.arange(n), n)), np.arange(n))


@given(n=st.integers(2**20, 2**42), seed=_seeds, data=st.data())
@settings(deadline=None)
def test_large_permutations_stay_in_range_without_collisions(n: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1000))
    values = permute(seed, 3, np.arange(start, start + 1000), n)
    assert values.min() >= 0 and values.max() < n
    assert len(np.unique(values)) == 1000


@given(n=st.integers(1, 2**41), seed=_seeds, data=st.data())
@settings(deadline=None)
def test_a_value_does_not_depend_on_the_other_indexes(n: int, seed: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    together = permute(seed, 0, indices, n)
    assert [int(permute(seed, 0, [i], n)[0]) for i in indices] == together.tolist()


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = [tuple(permute(seed, epoch, np.arange(100), 100)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100


def test_every_position_is_equally_likely() -> None:
    # Chi-square over 2000 keys and 7 outcomes, for each of 7 indices. With 6 degrees of freedom a value above 35
    # has probability 4e-6 for a true uniform law, and the keys are fixed.
    n, keys = 7, 2000
    counts = np.zeros((n, n))
    for seed in range(keys):
        counts[np.arange(n), permute(seed, 0, np.arange(n), n)] += 1
    expected = keys / n
    assert ((counts - expected) ** 2 / expected).sum(axis=1).max() < 35


def test_neighbours_do_not_stay_neighbours() -> None:
    # |a - b| of two independent uniforms on [0, n) has mean n / 3 and standard deviation n / sqrt(18);
    # over 2**16 pairs the mean is within 6 standard errors.
    n = 10**9 + 7
    values = permute(1, 0, np.arange(2**16 + 1), n)
    distance = np.abs(np.diff(values)).mean() / n
    assert abs(distance - 1 / 3) < 6 / np.sqrt(18 * 2**16)
