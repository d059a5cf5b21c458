"""Random bits of stochastic rounding: Threefry as published, uniform, and independent for different addresses."""

import math

import pytest
import torch

from hlat.precision import element_bits, step_keys, stream_keys, threefry

CPU = torch.device("cpu")
DRAWS = 1 << 20


def words(*values: int) -> list[torch.Tensor]:
    return list(torch.tensor(values, dtype=torch.int64).to(torch.int32).unbind())


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("rounds", "counter_and_key", "expected"),
    [
        (13, (0, 0, 0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (0xFFFFFFFF,) * 4, (0xFD36D048, 0x2D17272C)),
        (13, PI, (0xBA3E4725, 0xF27D669E)),
        (20, (0, 0, 0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (0xFFFFFFFF,) * 4, (0x1CB996FC, 0xBB002BE7)),
        (20, PI, (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_test_vectors(rounds, counter_and_key, expected):
    """Source: Random123, tests/kat_vectors."""
    counter0, counter1, key0, key1 = words(*counter_and_key)
    found = threefry((key0, key1), (counter0, counter1), rounds)
    assert tuple(int(word) & 0xFFFFFFFF for word in found) == expected


def bits(seed: int = 0, name: str = "a", step: int = 1, row: int = 0, column: int = 0) -> list[torch.Tensor]:
    """Draw the three streams of 1024 x 1024 elements, from a given row and column of a tensor."""
    keys = step_keys(stream_keys(seed, "rounding", [name], CPU), torch.tensor([step]))
    rows = torch.arange(row, row + 1024, dtype=torch.int32).unsqueeze(1)
    columns = torch.arange(column, column + 1024, dtype=torch.int32)
    return [stream.flatten() for stream in element_bits((keys[0], keys[1]), rows, columns)]


def assert_uniform(bins: torch.Tensor, count: int) -> None:
    """Assert that Pearson's chi-square (mean count - 1, variance 2 (count - 1)) is within five standard deviations.

    The lower limit matters too: bits that are too evenly distributed are not random either.
    """
    expected = bins.numel() / count
    chi_square = float(((torch.bincount(bins, minlength=count) - expected) ** 2 / expected).sum())
    assert abs(chi_square - (count - 1)) < 5 * math.sqrt(2 * (count - 1)), chi_square


def test_each_stream_is_uniform():
    for stream in bits():
        assert int(stream.min()) >= 0 and int(stream.max()) < 1 << 16
        assert_uniform(stream, 1 << 16)  # 16 expected per bin
        assert_uniform(stream >> 8, 256)
        assert_uniform(stream & 255, 256)


@pytest.mark.parametrize(
    "other",
    [{"column": 1}, {"row": 1}, {"column": 1024}, {"step": 2}, {"name": "b"}, {"seed": 1}, {"row": 1 << 30}],
    ids=str,
)
def test_streams_of_different_addresses_are_independent(other):
    """Pairs of draws, by their upper and by their lower four bits, are uniform over 256 bins."""
    for first, second in zip(bits(), bits(**other), strict=True):
        assert_uniform((first >> 12) * 16 + (second >> 12), 256)
        assert_uniform((first & 15) * 16 + (second & 15), 256)


def test_the_three_streams_of_an_element_are_independent():
    weight, exp_avg, exp_avg_sq = bits()
    for first, second in ((weight, exp_avg), (weight, exp_avg_sq), (exp_avg, exp_avg_sq)):
        assert_uniform((first >> 12) * 16 + (second >> 12), 256)
        assert_uniform((first & 15) * 16 + (second & 15), 256)


def test_every_bit_of_an_address_flips_every_random_bit_half_of_the_time():
    """Strict avalanche over 2**14 counters: each frequency is within five sigma, 0.5 / sqrt(2**14), of one half."""
    generator = torch.Generator().manual_seed(0)
    limits = (-(1 << 31), (1 << 31) - 1)
    address = [torch.randint(*limits, (1 << 14,), generator=generator).to(torch.int32) for _ in range(4)]
    draw = torch.stack(threefry((address[0], address[1]), (address[2], address[3])))
    shifts = torch.arange(32, dtype=torch.int32)
    for word in range(4):
        for bit in range(0, 32, 5):
            changed = list(address)
            changed[word] = changed[word] ^ torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            flipped = draw ^ torch.stack(threefry((changed[0], changed[1]), (changed[2], changed[3])))
            frequencies = ((flipped.unsqueeze(2) >> shifts) & 1).double().mean(1)
            assert float((frequencies - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(1 << 14), (word, bit)
