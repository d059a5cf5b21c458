"""The digest is the documented sum, detects every flipped bit, and does not depend on a tensor's storage."""

import random

import pytest
import torch

from hlat.resilience.replica_check import _GOLDEN, _OTHER, _WORDS, _digest_sums, _sums_of_products, digest

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def bits(count, dtype, seed=0):
    """Return a tensor of random bits, including NaNs."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


def by_hand(tensor):
    """Compute the same sum with Python integers."""
    size = tensor.element_size()
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    whole = len(raw) // 8 * 8
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, whole, 8)]
    rest = [int.from_bytes(raw[at : at + size], "little", signed=True) for at in range(whole, len(raw), size)]
    chunks = len(words) // _WORDS
    cut = [words[c * _WORDS : (c + 1) * _WORDS] for c in range(chunks)] + [words[chunks * _WORDS :] + rest]
    total = sum(
        (((c + 1) * _OTHER) | 1) * sum((((j + 1) * _GOLDEN) | 1) * word for j, word in enumerate(chunk))
        for c, chunk in enumerate(cut)
    )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("words", [0, 1, 100, _WORDS, 2 * _WORDS + 3])
def test_the_digest_is_the_weighted_sum_modulo_2_to_the_64(words, dtype):
    per_word = 8 // torch.empty(0, dtype=dtype).element_size()
    for extra in range(per_word):
        tensor = bits(words * per_word + extra, dtype, seed=extra)
        assert int(digest(tensor)) == by_hand(tensor), extra


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flip_of_any_single_bit_changes_the_digest(dtype):
    tensor = bits(37, dtype)
    before, raw = int(digest(tensor)), tensor.view(torch.uint8)
    for bit in range(8 * raw.numel()):
        raw[bit // 8] ^= 1 << bit % 8
        assert int(digest(tensor)) != before, bit
        raw[bit // 8] ^= 1 << bit % 8
    assert int(digest(tensor)) == before


def test_a_flipped_bit_anywhere_in_a_large_tensor_changes_the_digest():
    tensor = bits(3 * _WORDS * 2 + 77, torch.float32)
    before, raw, rng = int(digest(tensor)), tensor.view(torch.uint8), random.Random(0)
    for _ in range(200):
        bit = rng.randrange(8 * raw.numel())
        raw[bit // 8] ^= 1 << bit % 8
        assert int(digest(tensor)) != before
        raw[bit // 8] ^= 1 << bit % 8


def test_swapped_elements_and_rows_change_the_digest():
    matrix = bits(512 * 64, torch.float32).view(512, 64)
    before = int(digest(matrix))
    for first, second in ((0, 1), (3, 400), (510, 511)):
        swapped = matrix.clone()
        swapped[[first, second]] = matrix[[second, first]]
        assert int(digest(swapped)) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_does_not_depend_on_the_storage_offset(dtype):
    """Rows of a matrix of odd width begin at any offset within a word."""
    matrix = bits(9 * 33, dtype).view(9, 33)
    for row in range(9):
        assert int(digest(matrix[row:])) == int(digest(matrix[row:].clone()))
    assert int(digest(matrix.t())) == int(digest(matrix.t().contiguous()))


def test_accelerators_compute_the_same_digest():
    words, weights = bits(130 * 64, torch.int64).view(130, 64), bits(64, torch.int64, seed=1)
    assert torch.equal(_sums_of_products(words, weights), _digest_sums(words, weights))
    assert _sums_of_products(words[:0], weights).shape == (0,)
