"""The floor of the house: device, randomness, errors. The only room that knows the backend."""

from hlat.runtime.device import (
    Runtime,
    describe,
    has_fast_bf16,
    peak_memory_bytes,
    start,
    synchronize,
)
from hlat.runtime.disk import sync_to_disk
from hlat.runtime.errors import CheckpointError, DataError, HlatError, LaunchError, NumericsError, StorageError
from hlat.runtime.random import normal_block, normal_range, philox, stream_key
from hlat.runtime.rng import rng_state, seed_generators, set_rng_state

__all__ = [
    "CheckpointError",
    "DataError",
    "HlatError",
    "LaunchError",
    "NumericsError",
    "Runtime",
    "StorageError",
    "describe",
    "has_fast_bf16",
    "normal_block",
    "normal_range",
    "peak_memory_bytes",
    "philox",
    "rng_state",
    "seed_generators",
    "set_rng_state",
    "start",
    "stream_key",
    "sync_to_disk",
    "synchronize",
]
