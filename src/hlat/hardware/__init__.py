"""Chips and instances: rates, prices, failure rates; and the peak FLOP/s of the device in use.

Modules that measure need torch. They are imported on first use.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.hardware.catalog import Catalog as Catalog
    from hlat.hardware.catalog import Chip as Chip
    from hlat.hardware.catalog import Instance as Instance
    from hlat.hardware.catalog import LaunchSettings as LaunchSettings
    from hlat.hardware.catalog import PriceKind as PriceKind
    from hlat.hardware.catalog import installed_chip as installed_chip
    from hlat.hardware.catalog import load_catalog as load_catalog
    from hlat.hardware.cluster import HOST_SHARE as HOST_SHARE
    from hlat.hardware.cluster import OWN as OWN
    from hlat.hardware.cluster import Cluster as Cluster
    from hlat.hardware.cluster import Per as Per
    from hlat.hardware.cluster import Site as Site
    from hlat.hardware.cluster import StorageRate as StorageRate
    from hlat.hardware.cluster import close_names as close_names
    from hlat.hardware.cluster import parse_cluster as parse_cluster
    from hlat.hardware.cluster import parse_quote as parse_quote
    from hlat.hardware.cluster import parse_site as parse_site
    from hlat.hardware.cluster import with_prices_of as with_prices_of
    from hlat.hardware.cluster import with_quote as with_quote
    from hlat.hardware.machine import MeasuredMachine as MeasuredMachine
    from hlat.hardware.machine import measure_machine as measure_machine
    from hlat.hardware.peak import PeakFlops as PeakFlops
    from hlat.hardware.peak import device_chip as device_chip
    from hlat.hardware.peak import measure_matmul as measure_matmul
    from hlat.hardware.peak import peak_flops as peak_flops
    from hlat.hardware.peak import published_flops as published_flops

__getattr__ = lazily(
    __name__,
    {
        "catalog": "Catalog Chip Instance LaunchSettings PriceKind installed_chip load_catalog",
        "cluster": (
            "Cluster HOST_SHARE OWN Per Site StorageRate close_names parse_cluster parse_quote parse_site "
            "with_prices_of with_quote"
        ),
        "machine": "MeasuredMachine measure_machine",
        "peak": "PeakFlops device_chip measure_matmul peak_flops published_flops",
    },
)
