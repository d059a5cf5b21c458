"""Randomness that is addressed, not consumed; and the state of the generators that libraries consume.

A draw is a pure function of (seed, purpose, name, element index). Drawing changes no state, so a tensor gets the same
bits if it is sharded, initialized in another order, or rebuilt after a restart:

    (seed, purpose, name) --stream_key (random_keys.py)--> 64-bit key
    (key, element index)  --philox-->                      uniform 32-bit words --> uniforms, normals

    generators of torch's CPU and accelerator, random, numpy.random <--rng_state, set_rng_state--> tensors

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), which CUDA and
Triton use too. It is written with 64-bit integer tensor operations, which wrap identically on every device.

hlat never draws from the stateful generators. A library may use them, so their states are saved: a resumed process then
draws the same numbers as one that was never interrupted.
"""

import math
import random
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hlat.runtime.errors import CheckpointError

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_CHUNK = 1 << 14  # counters per pass: temporaries stay in cache, and integer operations on the calling thread


def _high_low(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The 64-bit product may wrap to a negative number; its two words are right all the same.
    low = word * multiplier
    high = low >> 32
    high &= _MASK
    low &= _MASK
    return high, low


def philox(key: int, counter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Generate four words of 32 random bits per int64 counter, of any shape: int64 in [0, 2**32).

    The key has 64 bits; counters are not negative.
    """
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(_MULTIPLIER_0, c0)
        high1, low1 = _high_low(_MULTIPLIER_1, c2)
        # In place: new memory for each result takes as long as computing it.
        high1 ^= c1
        high1 ^= k0
        high0 ^= c3
        high0 ^= k1
        c0, c1, c2, c3 = high1, low1, high0, low0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def _normals_of_counters(key: int, counter: torch.Tensor) -> torch.Tensor:
    """Standard normals by the Box-Muller transform: float64, (len(counter), 4)."""
    word0, word1, word2, word3 = philox(key, counter)
    # Transcendental functions may differ between machines in the last bit of float64. After rounding to float32 or less
    # that disappears, except in about one of 2**29 values.
    radius = _uniforms(word0, word2).log_().mul_(-2.0).sqrt_()
    angle = _uniforms(word1, word3).mul_(2.0 * math.pi)
    out = counter.new_empty((len(counter), 4), dtype=torch.float64)
    torch.mul(radius, angle.cos(), out=out[:, 0::2].T)
    torch.mul(radius, angle.sin_(), out=out[:, 1::2].T)
    return out


def _uniforms(*words: torch.Tensor) -> torch.Tensor:
    # Never 0, of which there is no logarithm, and never 1.
    return torch.stack(words).to(torch.float64).add_(0.5).mul_(2.0**-32)


def normal_range(key: int, start: int, stop: int) -> torch.Tensor:
    """Standard normals of the elements ``start <= index < stop`` of a stream: float32, on the CPU."""
    # On the CPU, so that every device starts from the same bits.
    out = torch.empty(stop - start, dtype=torch.float32)

    def fill(span: tuple[int, int]) -> None:
        begin, end = span
        first, last = begin // 4, (end + 3) // 4
        values = _normals_of_counters(key, torch.arange(first, last, dtype=torch.int64)).flatten()
        out[begin - start : end - start] = values[begin - 4 * first : end - 4 * first].to(torch.float32)

    # Each thread computes spans of its own. Threads that share each of the hundreds of operations of a span would wait
    # for each other after each, which takes minutes where another program has one of the cores.
    spans = [(begin, min(begin + 4 * _CHUNK, stop)) for begin in range(start, stop, 4 * _CHUNK)]
    if len(spans) <= 1 or torch.get_num_threads() == 1:
        for span in spans:
            fill(span)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill, spans))
    return out


def normal_block(key: int, first_row: int, rows: int, row_size: int, first_column: int, columns: int) -> torch.Tensor:
    """Standard normals of a block of a stream, seen as a row-major matrix: fp32, (rows, columns), CPU.

    Element (i, j) of the block is element ``(first_row + i) * row_size + first_column + j`` of the stream.
    """
    if columns == row_size:
        first = first_row * row_size
        return normal_range(key, first, first + rows * row_size).view(rows, columns)
    out = torch.empty(rows, columns, dtype=torch.float32)
    # Only the counters that the block needs.
    counters = (columns + 3) // 4 + 1  # upper bound for one row of the block
    step = max(1, _CHUNK // counters)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        first_R1 = (torch.arange(first_row + begin, first_row + end) * row_size + first_column).unsqueeze(1)
        counter_RC = first_R1 // 4 + torch.arange(counters)
        values = _normals_of_counters(key, counter_RC.flatten()).view(end - begin, 4 * counters)
        out[begin:end] = values.gather(1, first_R1 % 4 + torch.arange(columns)).to(torch.float32)
    return out


_MT_WORDS = 624  # words of state of a Mersenne twister: Python's and numpy's legacy generator
_PYTHON_VERSION = 3  # of the tuple that random.getstate() returns


def seed_generators(seed: int) -> None:
    """Seed every generator of torch, numpy and Python, for libraries that draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator as copied CPU tensors: uint8 of torch, int64 of Python and numpy."""
    state = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state["accelerator"] = torch.get_device_module(accelerator).get_rng_state().cpu()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the states returned by ``rng_state``.

    Raises:
        CheckpointError: a state does not fit its generator.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        torch.set_rng_state(state["torch"])
        _set_python_state(state["python"])
        _set_numpy_state(state["numpy"])
        # A run can move between device types.
        if accelerator is not None and "accelerator" in state:
            torch.get_device_module(accelerator).set_rng_state(state["accelerator"])
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as exc:
        raise CheckpointError(f"the saved state of the random generators does not fit ({exc!r})") from exc


def _python_state() -> torch.Tensor:
    """int64: 624 words, position, 1 if a Gaussian is cached else 0, its bits."""
    version, internal, gauss = random.getstate()
    assert version == _PYTHON_VERSION, "the generator of every supported Python"
    return torch.tensor([*internal, gauss is not None, _bits_of_float(gauss or 0.0)], dtype=torch.int64)


def _set_python_state(state: torch.Tensor) -> None:
    *internal, has_gauss, gauss = state.tolist()
    random.setstate((_PYTHON_VERSION, tuple(internal), _float_of_bits(gauss) if has_gauss else None))


def _numpy_state() -> torch.Tensor:
    """int64: 624 words, position, 1 if a Gaussian is cached else 0, its bits."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict) and state["bit_generator"] == "MT19937", "numpy's legacy generator"
    words, position = state["state"]["key"], state["state"]["pos"]
    return torch.tensor(
        [*words.tolist(), position, state["has_gauss"], _bits_of_float(state["gauss"])], dtype=torch.int64
    )


def _set_numpy_state(state: torch.Tensor) -> None:
    *words, position, has_gauss, gauss = state.tolist()
    if len(words) != _MT_WORDS:
        raise ValueError(f"{len(words)} words of state instead of {_MT_WORDS}")
    key = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, _float_of_bits(gauss)))


def _bits_of_float(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float_of_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
