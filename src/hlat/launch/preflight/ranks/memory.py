"""Facts about the memory of the device."""

from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend import backend_of


def measure(place: RankPlace) -> Facts:
    """Return free and total bytes of the device; nothing for one that is the memory of the host."""
    backend = backend_of(place.device)
    if backend.is_shared:
        return {}
    return {"free": backend.free_memory_bytes(place.device), "total": backend.memory_bytes(place.device)}
