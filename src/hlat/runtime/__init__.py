"""The floor of the house: device, processes, randomness, errors. The only room that knows the backend.

What needs torch is imported when it is first asked for: ``hlat check`` and a refused recipe do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hlat.runtime.errors import CheckpointError, DataError, HlatError, LaunchError, NumericsError, StorageError
from hlat.runtime.keys import stream_key
from hlat.runtime.place import Place, place

if TYPE_CHECKING:
    from hlat.runtime.device import compute_capability, describe, has_fast_bf16, peak_memory_bytes, synchronize
    from hlat.runtime.disk import sync_to_disk
    from hlat.runtime.identity import check_same, code_identity
    from hlat.runtime.processes import Runtime, abandon, finish, joined, start
    from hlat.runtime.random import normal_block, normal_range, philox
    from hlat.runtime.ranklog import log_path, rank_log
    from hlat.runtime.ranks import Ranks
    from hlat.runtime.rng import rng_state, seed_generators, set_rng_state
    from hlat.runtime.vote import Vote

_WITH_TORCH = {
    "device": ("compute_capability", "describe", "has_fast_bf16", "peak_memory_bytes", "synchronize"),
    "disk": ("sync_to_disk",),
    "identity": ("check_same", "code_identity"),
    "processes": ("Runtime", "abandon", "finish", "joined", "start"),
    "random": ("normal_block", "normal_range", "philox"),
    "ranklog": ("log_path", "rank_log"),
    "ranks": ("Ranks",),
    "rng": ("rng_state", "seed_generators", "set_rng_state"),
    "vote": ("Vote",),
}
_MODULES = {name: module for module, names in _WITH_TORCH.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "CheckpointError",
    "DataError",
    "HlatError",
    "LaunchError",
    "NumericsError",
    "Place",
    "Ranks",
    "Runtime",
    "StorageError",
    "Vote",
    "abandon",
    "check_same",
    "code_identity",
    "compute_capability",
    "describe",
    "finish",
    "has_fast_bf16",
    "joined",
    "log_path",
    "normal_block",
    "normal_range",
    "peak_memory_bytes",
    "philox",
    "place",
    "rank_log",
    "rng_state",
    "seed_generators",
    "set_rng_state",
    "start",
    "stream_key",
    "sync_to_disk",
    "synchronize",
]
