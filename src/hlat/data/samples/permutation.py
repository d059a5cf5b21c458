"""A pseudorandom permutation by formula: (seed, epoch, position) -> index, without storing a list.

A balanced Feistel network permutes the numbers of an even number of bits whatever its round function is (Luby and
Rackoff 1988); a number outside [0, n) is permuted again until it falls inside, which leaves a permutation of [0, n)
("cycle walking", Black and Rogaway 2002). The domain has fewer than 4 n numbers, or 64 for tiny n.
"""

import numpy as np
import numpy.typing as npt

from hlat.runtime.randomness.rng_keys import stream_key

_ROUNDS = 8
_LEAST_HALF_BITS = 3
_TABLE_HALF_BITS = 5
# Multipliers of the finaliser of MurmurHash3 (Appleby), which mixes 64 bits.
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_33 = np.uint64(33)


def permute(seed: int, epoch: int, index: npt.ArrayLike, n: int) -> npt.NDArray[np.int64]:
    """Return the value at each index of the permutation of [0, n) that belongs to (seed, epoch).

    Args:
        seed: the seed of the run.
        epoch: the epoch; each has its own permutation.
        index: integers in [0, n), any shape.
        n: size of the permutation, up to 2**62.

    Returns:
        int64, the shape of ``index``; over all of [0, n) each value occurs once.

    Raises:
        IndexError: an index is outside [0, n).
    """
    values = np.asarray(index, dtype=np.int64)
    if values.size and not (values.min() >= 0 and values.max() < n):
        raise IndexError(f"indices must be in [0, {n})")
    half = max(_LEAST_HALF_BITS, (max(n - 1, 1).bit_length() + 1) // 2)
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
