"""Keys of random streams (``randomness.py``), without torch, for processes that only read text."""

import hashlib


def stream_key(seed: int, purpose: str, *names: str | int) -> int:
    """Return the 64-bit key of a stream: a hash of the seed, the purpose and the names of what is drawn."""
    text = "\x1f".join([str(seed), purpose, *map(str, names)])  # a separator that names do not contain
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
