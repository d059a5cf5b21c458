r"""Peak FLOP/s of a device, the denominator of MFU: from the catalog, or measured. Never that of a similar chip.

device -> its chip, if in the catalog -> the catalog's figure
\-> otherwise                  -> a burst of matrix products
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hlat.hardware.catalog import Catalog, Chip
from hlat.hardware.loading import load_catalog
from hlat.hardware.measure import measure_matmul
from hlat.runtime.backend import has_fast_bf16
from hlat.runtime.distributed import sendable

# The hypervisor of EC2 writes the instance type here; Neuron devices report no chip name of their own.
_PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")


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
        The published figure if the catalog has exactly this chip and dtype, else a measurement (about 0.3 s).
    """
    catalog = load_catalog()
    chip = _identify(device, catalog)
    published = _published(chip, catalog, dtype_key(device, dtype), os.environ) if chip is not None else None
    return published or _measured(device, dtype)


def dtype_key(device: torch.device, dtype: torch.dtype) -> str:
    """Name of a dtype in the catalog: ``tf32`` for float32 if torch's products run in TF32."""
    if dtype == torch.float32 and device.type == "cuda":
        setting = torch.backends.cuda.matmul.fp32_precision
        if setting == "none":  # not set for matmul: the global setting applies
            setting = torch.backends.fp32_precision  # type: ignore[attr-defined]
        if setting == "tf32":
            return "tf32"
    return str(dtype).removeprefix("torch.")


def _identify(device: torch.device, catalog: Catalog) -> Chip | None:
    if device.type == "cpu":
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    chip = catalog.chip_by_torch_name(str(name(device))) if name is not None else None
    if chip is None and device.type == "neuron":
        chip = catalog.chip_by_instance_type(_instance_type(_PRODUCT_NAME))
    return chip


def _instance_type(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _published(chip: Chip, catalog: Catalog, dtype: str, environment: Mapping[str, str]) -> PeakFlops | None:
    """The catalog's figure for one device of this chip, or None."""
    cores = chip.cores_per_device
    configured = environment.get("NEURON_LOGICAL_NC_CONFIG", "")
    if chip.ec2_families and configured.isdecimal() and int(configured) > 0:
        cores = int(configured)
    value = chip.flops(dtype, cores)
    if value is None:
        return None
    share = f", {cores} of {chip.cores} cores" if cores != chip.cores else ""
    return PeakFlops(value, f"{chip.name}{share}, {dtype}: {catalog.sources[chip.tflops[dtype].source]}")


def _measured(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    widened = dtype == torch.bfloat16 and device.type == "cpu" and not has_fast_bf16(device)
    computed = torch.float32 if widened else dtype
    best = measure_matmul(device, computed)
    name = str(computed).removeprefix("torch.")
    threads = f" on {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    widening = ", in which bfloat16 is computed here" if computed != dtype else ""
    return PeakFlops(best.flops, f"measured here: {name} products of {best.size} x {best.size}{threads}{widening}")
