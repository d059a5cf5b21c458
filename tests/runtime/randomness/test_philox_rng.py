"""Addressed randomness: any range of a stream equals that slice of a longer range, and the bits are Philox's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hlat.runtime import randomness as module
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import normal_block, normal_range, philox

KEYS = st.integers(0, 2**64 - 1)
COUNTERS = st.integers(0, 2**63 - 1)


def test_known_answer_of_the_paper() -> None:
    """Published vector of philox4x32-10 for counter 0 and key 0 (kat_vectors of Random123)."""
    words = [int(word) for word in philox(0, torch.tensor(0))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def reference(key: int, counter: int) -> list[int]:
    """The ten rounds of the paper in Python's integers, which do not overflow."""
    mask = 2**32 - 1
    c, k = [counter & mask, counter >> 32, 0, 0], [key & mask, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & mask, (first >> 32) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


@given(KEYS, COUNTERS)
@example(2**64 - 1, 2**63 - 1)
@example(0, 0)
@settings(deadline=None)
def test_any_key_and_counter_match_exact_arithmetic(key: int, counter: int) -> None:
    assert [int(word) for word in philox(key, torch.tensor(counter))] == reference(key, counter)


@given(st.data())
@settings(deadline=None)
def test_a_range_equals_the_slice_of_a_longer_range(data: st.DataObject) -> None:
    key = data.draw(KEYS)
    origin = data.draw(st.integers(0, 2**62))
    start = data.draw(st.integers(0, 300))
    stop = data.draw(st.integers(start, 300))
    full = normal_range(key, origin, origin + 300)
    assert torch.equal(normal_range(key, origin + start, origin + stop), full[start:stop])


@pytest.mark.parametrize("first_row", [0, 140_000])
@pytest.mark.parametrize("columns", [16_384, 700])
def test_a_block_of_a_matrix_with_more_than_two_to_the_31_elements_is_its_rows(first_row: int, columns: int) -> None:
    """Row 140,000 begins at element 2.3e9, past 2^31."""
    size, first = 16_384, 16_384 - columns
    block = normal_block(7, first_row, 3, size, first, columns)
    for row, values in enumerate(block):
        begin = (first_row + row) * size + first
        assert torch.equal(values, normal_range(7, begin, begin + columns))


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_chunk_size_does_not_matter(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    full = normal_range(11, 5, 4000)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    assert torch.equal(normal_range(11, 5, 4000), full)


def test_ranges_across_a_chunk_boundary() -> None:
    edge = 4 * module._CHUNK
    full = normal_range(9, 0, edge + 50)
    assert torch.equal(normal_range(9, edge - 50, edge + 50), full[edge - 50 :])


@given(st.integers(), st.text(max_size=8), st.lists(st.one_of(st.integers(), st.text(max_size=4)), max_size=3))
def test_stream_keys_are_64_bits_and_depend_on_every_part(seed: int, purpose: str, names: list[str | int]) -> None:
    key = stream_key(seed, purpose, *names)
    assert 0 <= key < 2**64
    others = {stream_key(seed + 1, purpose, *names), stream_key(seed, purpose + "x", *names)}
    others.add(stream_key(seed, purpose, *names, "more"))
    assert key not in others and len(others) == 3


def test_streams_are_stable_over_releases() -> None:
    """Changing these values changes the initial weights for every seed: a breaking change."""
    assert stream_key(0, "init", "model.embed_tokens.weight") == 0xD1689559C0EEA7C1
    assert normal_range(1, 0, 3).tolist() == [0.38040074706077576, -0.29627788066864014, -0.2492334246635437]


N = 1 << 20


def test_normals_are_normal() -> None:
    """Moments and the distribution function of 2^20 draws of one stream, each within 5 standard errors.

    For standard normals: the mean errs by 1/sqrt(n), the variance by sqrt(2/n), third and fourth moments by sqrt(15/n)
    and sqrt(96/n); the empirical distribution function deviates by more than sqrt(ln(2/p) / (2 n)) anywhere with
    probability p (Dvoretzky, Kiefer and Wolfowitz), here p = 6e-7 as for 5 standard errors.
    """
    x = normal_range(stream_key(3, "test"), 0, N).double()
    moments = [float(x.pow(k).mean()) for k in (1, 2, 3, 4)]
    for moment, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(moment - expected) < 5 * math.sqrt(variance / N)
    share = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    steps = torch.arange(1, N + 1, dtype=torch.float64) / N
    assert float((share - steps).abs().max()) < math.sqrt(math.log(2 / 6e-7) / (2 * N)) + 1 / N


def test_neighbours_and_streams_are_uncorrelated() -> None:
    """The sample correlation of independent normals has standard error 1/sqrt(n)."""
    x, y = (normal_range(stream_key(3, "test", name), 0, N).double() for name in "ab")
    for shift in (1, 2, 3, 4):
        assert abs(float((x[shift:] * x[:-shift]).mean())) < 5 / math.sqrt(N)
    assert abs(float((x * y).mean())) < 5 / math.sqrt(N)


def test_every_bit_of_every_word_is_fair() -> None:
    """The count of a fair bit in n draws has standard error sqrt(n)/2; 6 of them cover 128 bits."""
    n = 1 << 16
    words = np.stack([word.numpy() for word in philox(12345, torch.arange(n))])
    ones = (words[..., None] >> np.arange(32) & 1).sum(axis=1)
    assert np.abs(ones - n / 2).max() < 6 * math.sqrt(n) / 2
