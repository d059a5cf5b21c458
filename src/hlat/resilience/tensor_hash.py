"""Digest of a tensor's bits, computed on its device at memory bandwidth.

tensor --its bits as 64-bit words, each times an odd weight--> sum modulo 2^64

A flipped bit changes one word by plus or minus 2^b, b < 64, and so the sum by 2^b times an odd number, which is never a
multiple of 2^64: every change of a single bit is detected. Several changes cancel only if the changes of the words,
times their pseudo-random weights, add up to a multiple of 2^64. The digest is not cryptographic.
"""

import functools

import torch

from hlat.runtime.backend.table import backend_of

_WORDS = 1 << 16  # words of a chunk: the words and weights of one chunk fit in cache
_CHUNKS = 64  # chunks at a time, on devices that store the products
_GOLDEN, _OTHER = -0x61C8864680B583EB, -0x3B314601E57A13AD  # odd; their multiples modulo 2^64 are pseudo-random
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor's elements in their order: an int64 scalar on its device.

    Equal bits give equal digests on every device: integer addition wraps the same way everywhere, in any order.
    """
    flat = tensor.reshape(-1)
    per_word = 8 // flat.element_size()
    in_words = flat.numel() // per_word * per_word
    aligned = flat[:in_words] if flat.storage_offset() % per_word == 0 else flat[:in_words].clone()
    words = aligned.view(torch.int64)
    rest = flat[in_words:].view(_INTEGERS[flat.element_size()]).to(torch.int64)
    chunks = words.numel() // _WORDS
    inner, outer = _weights(_WORDS + per_word, _GOLDEN, flat.device), _weights(chunks + 1, _OTHER, flat.device)
    sums = _sums(words[: chunks * _WORDS].view(chunks, _WORDS), inner[:_WORDS])
    last = torch.cat((words[chunks * _WORDS :], rest))
    return (sums * outer[:chunks]).sum() + (last * inner[: last.numel()]).sum() * outer[chunks]


def _sums(words_CW: torch.Tensor, weights_W: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the words of each chunk: (C, W), (W,) -> (C,)."""
    if backend_of(words_CW.device).has_integer_mv:
        return torch.mv(words_CW, weights_W)  # stores no products
    return _sums_of_products(words_CW, weights_W)


def _sums_of_products(words_CW: torch.Tensor, weights_W: torch.Tensor) -> torch.Tensor:
    sums = [(words * weights_W).sum(1) for words in words_CW.split(_CHUNKS)]
    return torch.cat(sums) if sums else words_CW.new_zeros(0)


@functools.lru_cache(maxsize=64)
def _weights(count: int, multiplier: int, device: torch.device) -> torch.Tensor:
    """Return an odd pseudo-random weight for each position: int64, (count,)."""
    return torch.arange(1, count + 1, device=device) * multiplier | 1
