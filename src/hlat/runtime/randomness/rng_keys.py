"""The key of a stream of random numbers; without torch, for processes that only read text."""

import hashlib


def stream_key(seed: int, purpose: str, *names: str | int) -> int:
    """The 64-bit key of one stream: a hash of the seed, what the draw is for, and whose it is."""
    text = "\x1f".join([str(seed), purpose, *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
