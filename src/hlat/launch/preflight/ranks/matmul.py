"""Matrix products with known results.

    integers: the result is exact in float32, whatever the order of the sums --> compared with numpy, on the host
    sines: rounded --> equal devices with equal software give equal bits

The kind of a device is everything that may change the order of sums: chip, processor, torch, threads.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend.table import backend_of

_SIZE = 256  # sums of 256 products of -4 to 4 stay below 2^13, and exact
_ROUNDED_SIZE = 512
_REPEATS = 3


def measure(place: RankPlace) -> Facts:
    """Return the first wrong element of an exact product, and hashes of a rounded one."""
    values = torch.arange(_ROUNDED_SIZE * _ROUNDED_SIZE, dtype=torch.float32).sin().view(_ROUNDED_SIZE, _ROUNDED_SIZE)
    left = values.to(place.device)
    right = left.t().contiguous()
    hashes = [
        hashlib.blake2b(place.tools.product(left, right).cpu().numpy().tobytes(), digest_size=8).hexdigest()
        for _ in range(_REPEATS)
    ]
    return {"wrong": _wrong_element(place), "hashes": hashes, "kind": device_kind(place.device)}


def _wrong_element(place: RankPlace) -> dict[str, int | float] | None:
    index = np.arange(_SIZE * _SIZE, dtype=np.int64).reshape(_SIZE, _SIZE)
    left, right = index * 7 % 9 - 4, index * 5 % 7 - 3
    expected = left @ right  # integers: numpy adds them without a floating-point library
    product = place.tools.product(
        torch.from_numpy(left).to(place.device, torch.float32), torch.from_numpy(right).to(place.device, torch.float32)
    )
    found = product.cpu().numpy()
    places = np.argwhere(found != expected)
    if not len(places):
        return None
    row, column = (int(number) for number in places[0])
    value = float(found[row, column])
    return {"row": row, "column": column, "value": value, "expected": int(expected[row, column])}


def device_kind(device: torch.device) -> str:
    """Return everything that may change the bits of a product: chip, processor, torch, threads."""
    backend = backend_of(device)
    parts = [backend.describe(device), str(torch.__version__)]
    if backend.uses_host_threads:
        parts.append(_processor())
    return ", ".join(parts)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
