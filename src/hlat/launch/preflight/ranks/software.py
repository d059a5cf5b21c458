"""Facts about the software: versions, and a hash of hlat's source files."""

from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.consistency import code_identity


def measure(place: RankPlace) -> Facts:
    """Return versions of libraries and driver, and the hash of hlat's source."""
    versions = dict(code_identity())
    return {"source": versions.pop("source"), "versions": {**versions, **backend_of(place.device).software()}}
