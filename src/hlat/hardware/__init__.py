"""What devices and machines can do, what they cost and how often they fail; and the peak of the device at hand.

What measures, and therefore needs torch, is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hlat.hardware.catalog import Catalog, Chip, Instance, PriceKind
from hlat.hardware.cluster import Cluster, parse_cluster
from hlat.hardware.loading import load_catalog

if TYPE_CHECKING:
    from hlat.hardware.machine import MeasuredMachine, measure_machine
    from hlat.hardware.peak import PeakFlops, peak_flops

_WITH_TORCH = {
    "MeasuredMachine": "machine",
    "measure_machine": "machine",
    "PeakFlops": "peak",
    "peak_flops": "peak",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)


__all__ = [
    "Catalog",
    "Chip",
    "Cluster",
    "Instance",
    "MeasuredMachine",
    "PeakFlops",
    "PriceKind",
    "load_catalog",
    "measure_machine",
    "parse_cluster",
    "peak_flops",
]
