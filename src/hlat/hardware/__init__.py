"""Chips and instances: rates, prices, failure rates; and the peak FLOP/s of the device in use.

Modules that measure need torch. They are imported on first use.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.hardware.all_reduce_rate import *
    from hlat.hardware.catalog import *
    from hlat.hardware.cluster import *
    from hlat.hardware.machine import *
    from hlat.hardware.prices import *

__getattr__ = lazily(
    __name__,
    {
        "all_reduce_rate": "fastest_all_reduce",
        "catalog": "Catalog Chip Instance LaunchSettings PriceKind installed_chip load_catalog",
        "cluster": (
            "Cluster HOST_SHARE Per Site StorageRate close_names no_price parse_cluster parse_site with_network"
        ),
        "machine": (
            "MeasuredMachine PeakFlops device_chip measure_machine measure_matmul peak_again peak_flops published_flops"
        ),
        "prices": "GIVEN OWN parse_quote quotes_text with_prices_of with_quote with_quotes",
    },
)
