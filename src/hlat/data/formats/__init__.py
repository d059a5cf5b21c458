"""File formats: read the bytes of a file as rows, and rows as documents.

base       the protocol of a format
registry   the list of all formats
columns    what a column holds: text, or token ids
streams    decompression, lines and records
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.formats.base import Companion, FileFormat
    from hlat.data.formats.document import (
        Content,
        ContentT,
        Vocabulary,
        content_bytes,
        text_byte_count,
        tokenize_contents,
        tokens_from_bytes,
    )
    from hlat.data.formats.megatron import MegatronDataset, index_path
    from hlat.data.formats.ranges import WHOLE, WHOLE_FILE, FileRange, RangeReader
    from hlat.data.formats.records import InputFile, Row, RowError, convert_file_errors
    from hlat.data.formats.registry import folder_format, format_named, format_of

__getattr__ = lazily(
    __name__,
    {
        "base": ("Companion", "FileFormat"),
        "document": (
            "Content",
            "ContentT",
            "Vocabulary",
            "content_bytes",
            "text_byte_count",
            "tokenize_contents",
            "tokens_from_bytes",
        ),
        "megatron": (
            "MegatronDataset",
            "index_path",
        ),
        "ranges": (
            "WHOLE",
            "WHOLE_FILE",
            "FileRange",
            "RangeReader",
        ),
        "records": (
            "InputFile",
            "Row",
            "RowError",
            "convert_file_errors",
        ),
        "registry": (
            "folder_format",
            "format_named",
            "format_of",
        ),
    },
)

__all__ = [
    "WHOLE",
    "WHOLE_FILE",
    "Companion",
    "Content",
    "ContentT",
    "FileFormat",
    "FileRange",
    "InputFile",
    "MegatronDataset",
    "RangeReader",
    "Row",
    "RowError",
    "Vocabulary",
    "content_bytes",
    "convert_file_errors",
    "folder_format",
    "format_named",
    "format_of",
    "index_path",
    "text_byte_count",
    "tokenize_contents",
    "tokens_from_bytes",
]
