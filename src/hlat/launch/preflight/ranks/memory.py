"""Facts about the memory of the device."""

from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend.table import backend_of


def measure(place: RankPlace) -> Facts:
    """Return free and total bytes of the device, and if this process has used it by joining; nothing on the host."""
    backend = backend_of(place.device)
    if backend.is_shared:
        return {}
    free, total = backend.free_memory_bytes(place.device), backend.memory_bytes(place.device)
    return {"free": free, "total": total, "joined": place.ranks.world > 1}
