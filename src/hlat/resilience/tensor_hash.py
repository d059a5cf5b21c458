"""A number that says whether two tensors are the same bits, computed where they are at the speed of reading them.

tensor --its bits as 64-bit words, each times an odd weight--> sum modulo 2^64

A flipped bit changes one word by plus or minus 2^b, b < 64, and so the sum by 2^b times an odd number, which is never a
multiple of 2^64: every change of a single bit is seen, for certain. Several changes hide each other only where their
sizes, times weights that look random, add up to a multiple of 2^64. It is no protection against an adversary.
"""

import functools

import torch

_WORDS = 1 << 16  # of a chunk: words and weights of one stay in cache
_CHUNKS = 64  # at a time, where their products are stored
_GOLDEN, _OTHER = -0x61C8864680B583EB, -0x3B314601E57A13AD  # odd; their multiples modulo 2^64 look random
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor's elements in their order: an int64 scalar on its device.

    Equal bits give equal numbers on every device. Integers wrap the same way everywhere, in any order of additions.
    """
    flat = tensor.reshape(-1)
    per_word = 8 // flat.element_size()
    whole = flat.numel() // per_word * per_word
    aligned = flat[:whole] if flat.storage_offset() % per_word == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    rest = flat[whole:].view(_INTEGERS[flat.element_size()]).to(torch.int64)
    chunks = words.numel() // _WORDS
    inner, outer = _weights(_WORDS + per_word, _GOLDEN, flat.device), _weights(chunks + 1, _OTHER, flat.device)
    sums = _sums(words[: chunks * _WORDS].view(chunks, _WORDS), inner[:_WORDS])
    last = torch.cat((words[chunks * _WORDS :], rest))
    return (sums * outer[:chunks]).sum() + (last * inner[: last.numel()]).sum() * outer[chunks]


def _sums(words_CW: torch.Tensor, weights_W: torch.Tensor) -> torch.Tensor:
    """Of each chunk, its words times their weights, added up."""
    if words_CW.device.type == "cpu":
        return torch.mv(words_CW, weights_W)  # stores no products; accelerators have none for integers
    return _sums_of_products(words_CW, weights_W)


def _sums_of_products(words_CW: torch.Tensor, weights_W: torch.Tensor) -> torch.Tensor:
    parts = [(part * weights_W).sum(1) for part in words_CW.split(_CHUNKS)]
    return torch.cat(parts) if parts else words_CW.new_zeros(0)


@functools.lru_cache(maxsize=64)
def _weights(count: int, multiplier: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, one for each place."""
    return torch.arange(1, count + 1, device=device) * multiplier | 1
