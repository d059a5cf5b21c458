"""Numbers as people type and read them, with units: 100M, 3h, 20GB, 80%; 1,370 MWh, 160B."""

from hlat.runtime.quantities.formatting import rounded_text, short_count
from hlat.runtime.quantities.parsing import (
    QuantityError,
    parse_bytes,
    parse_gibibytes,
    parse_length,
    parse_seconds,
    parse_share,
    parse_whole,
)

__all__ = [
    "QuantityError",
    "parse_bytes",
    "parse_gibibytes",
    "parse_length",
    "parse_seconds",
    "parse_share",
    "parse_whole",
    "rounded_text",
    "short_count",
]
