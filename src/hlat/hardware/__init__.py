"""Chips and instances: rates, prices, failure rates; and the peak FLOP/s of the device in use.

Modules that measure need torch. They are imported on first use.
"""

from typing import TYPE_CHECKING

from hlat.hardware.catalog import Catalog, Chip, Instance, LaunchSettings, PriceKind
from hlat.hardware.cluster import Cluster, close_names, parse_cluster
from hlat.hardware.loading import installed_chip, load_catalog
from hlat.hardware.quotes import OWN, Per, parse_quote, with_prices_of, with_quote
from hlat.hardware.site import HOST_SHARE, Site, StorageRate, parse_site
from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.hardware.machine import MeasuredMachine, measure_machine
    from hlat.hardware.measure import measure_matmul
    from hlat.hardware.peak import PeakFlops, device_chip, peak_flops, published_flops

__getattr__ = lazily(
    __name__,
    {
        "machine": ("MeasuredMachine", "measure_machine"),
        "measure": ("measure_matmul",),
        "peak": ("PeakFlops", "device_chip", "peak_flops", "published_flops"),
    },
)


__all__ = [
    "HOST_SHARE",
    "OWN",
    "Catalog",
    "Chip",
    "Cluster",
    "Instance",
    "LaunchSettings",
    "MeasuredMachine",
    "PeakFlops",
    "Per",
    "PriceKind",
    "Site",
    "StorageRate",
    "close_names",
    "device_chip",
    "installed_chip",
    "load_catalog",
    "measure_machine",
    "measure_matmul",
    "parse_cluster",
    "parse_quote",
    "parse_site",
    "peak_flops",
    "published_flops",
    "with_prices_of",
    "with_quote",
]
