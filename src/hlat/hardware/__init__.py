"""What devices and machines can do, what they cost and how often they fail; and the peak of the device at hand.

What measures, and therefore needs torch, is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from hlat.hardware.catalog import Catalog, Chip, Instance, PriceKind
from hlat.hardware.cluster import Cluster, parse_cluster
from hlat.hardware.loading import load_catalog
from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.hardware.machine import MeasuredMachine, measure_machine
    from hlat.hardware.peak import PeakFlops, peak_flops

__getattr__ = lazily(__name__, {"machine": ("MeasuredMachine", "measure_machine"), "peak": ("PeakFlops", "peak_flops")})


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
