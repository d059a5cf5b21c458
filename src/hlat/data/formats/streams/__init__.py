"""Streams of bytes: decompressed while they are read, and split into lines and records with bounded memory."""

from hlat.data.formats.streams.csv_records import CsvRecord, iter_records, split_fields
from hlat.data.formats.streams.decompression import (
    COMPRESSED_ENDINGS,
    DamagedStream,
    LongWindowError,
    Stream,
    describe_expansion,
    is_compressed,
    is_other_content,
    open_decompressed,
)
from hlat.data.formats.streams.line_reading import BOM, MAX_LINE_BYTES, iter_lines, skip_line

__all__ = [
    "BOM",
    "COMPRESSED_ENDINGS",
    "MAX_LINE_BYTES",
    "CsvRecord",
    "DamagedStream",
    "LongWindowError",
    "Stream",
    "describe_expansion",
    "is_compressed",
    "is_other_content",
    "iter_lines",
    "iter_records",
    "open_decompressed",
    "skip_line",
    "split_fields",
]
