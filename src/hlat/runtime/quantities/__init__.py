"""Numbers as people type them, with units: 100M, 3h, 20GB, 80%."""

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
]
