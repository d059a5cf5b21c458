r"""Peak FLOP/s of a device, the denominator of MFU: from the catalog, or measured. Never that of a similar chip.

device -> its chip, if in the catalog -> the catalog's figure
\-> otherwise                  -> a burst of matrix products
"""

from dataclasses import dataclass

import torch

from hlat.hardware.catalog import Catalog, Chip
from hlat.hardware.loading import load_catalog
from hlat.hardware.measure import measure_matmul
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.terminal_text import plural


@sendable
@dataclass(frozen=True)
class PeakFlops:
    """Peak rate of one device."""

    value: float
    """Dense FLOP/s; a multiply-add counts as two."""
    source: str
    """Source of the value: a publication, or ``measured here``."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Peak dense FLOP/s of matrix products on one device.

    Args:
        device: a CPU or an available accelerator.
        dtype: compute dtype. float32 means TF32 if torch is set to use it. bfloat16 means float32 on a CPU without bf16
            instructions, where hlat widens the operands.

    Returns:
        The published figure if the catalog has exactly this chip and dtype, else a measurement (about 0.3 s) of
        products by all libraries that training multiplies with.
    """
    return published_flops(device, dtype) or _measured(device, dtype)


def published_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """Return the published peak of one device; None if the catalog has no figure for exactly this chip and dtype."""
    catalog = load_catalog()
    chip = device_chip(device, catalog)
    return None if chip is None else _published(chip, catalog, device, dtype)


def device_chip(device: torch.device, catalog: Catalog) -> Chip | None:
    """Return the chip of a device; None if the catalog does not have it."""
    backend = backend_of(device)
    name = backend.chip_name(device)
    chip = catalog.chip_by_torch_name(name) if name is not None else None
    instance = backend.instance_type(device) if chip is None else None
    return chip if instance is None else catalog.chip_by_instance_type(instance)


def _published(chip: Chip, catalog: Catalog, device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """The catalog's figure for one device of this chip, or None."""
    backend = backend_of(device)
    cores, number_format = backend.cores_per_device() or chip.cores_per_device, backend.product_format(dtype)
    value = chip.flops(number_format, cores)
    if value is None:
        return None
    share = f", {cores} of {chip.cores} cores" if cores != chip.cores else ""
    source = catalog.sources[chip.tflops[number_format].source]
    return PeakFlops(value, f"{chip.name}{share}, {number_format}: {source}")


def _measured(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    backend = backend_of(device)
    computed = backend.product_dtype(dtype)
    best = measure_matmul(device, computed)
    name = str(computed).removeprefix("torch.")
    threads = f" on {plural(torch.get_num_threads(), 'thread')}" if backend.uses_host_threads else ""
    widening = ", in which bfloat16 is computed here" if computed != dtype else ""
    products = f"{name} products of {best.size} x {best.size} by {best.library}"
    return PeakFlops(best.flops, f"measured here: {products}{threads}{widening}")
