"""Facts about the device: its name, and an allocation on it."""

import torch

from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend.device import synchronize
from hlat.runtime.backend.table import backend_of


def measure(place: RankPlace) -> Facts:
    """Return the description of the device, after it has stored and returned a value."""
    stored = torch.full((1024,), 3.0, device=place.device)
    synchronize(place.device)
    if float(stored.sum().item()) != 3072.0:
        raise RuntimeError(f"{place.device} does not return the values that were stored on it")
    return {"device": backend_of(place.device).describe(place.device)}
