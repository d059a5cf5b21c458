"""File formats: read the bytes of a file as rows, and rows as documents."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.formats.document import (
        Content,
        ContentT,
        content_bytes,
        text_byte_count,
        tokenize_contents,
        tokens_from_bytes,
    )
    from hlat.data.formats.file_types import ARROW, JSON, MEGATRON, PARQUET, TEXT, file_type
    from hlat.data.formats.json_lines import read_lines
    from hlat.data.formats.megatron import MegatronDataset, index_path
    from hlat.data.formats.readers import read_documents
    from hlat.data.formats.records import Row, RowError
    from hlat.data.formats.tables import read_row_group, row_group_sizes, rows_of_column
    from hlat.data.formats.token_documents import TokenDocuments, Vocabulary

__getattr__ = lazily(
    __name__,
    {
        "document": (
            "Content",
            "ContentT",
            "content_bytes",
            "text_byte_count",
            "tokenize_contents",
            "tokens_from_bytes",
        ),
        "file_types": (
            "ARROW",
            "JSON",
            "MEGATRON",
            "PARQUET",
            "TEXT",
            "file_type",
        ),
        "json_lines": ("read_lines",),
        "megatron": (
            "MegatronDataset",
            "index_path",
        ),
        "readers": ("read_documents",),
        "records": (
            "Row",
            "RowError",
        ),
        "tables": (
            "read_row_group",
            "row_group_sizes",
            "rows_of_column",
        ),
        "token_documents": (
            "TokenDocuments",
            "Vocabulary",
        ),
    },
)

__all__ = [
    "ARROW",
    "JSON",
    "MEGATRON",
    "PARQUET",
    "TEXT",
    "Content",
    "ContentT",
    "MegatronDataset",
    "Row",
    "RowError",
    "TokenDocuments",
    "Vocabulary",
    "content_bytes",
    "file_type",
    "index_path",
    "read_documents",
    "read_lines",
    "read_row_group",
    "row_group_sizes",
    "rows_of_column",
    "text_byte_count",
    "tokenize_contents",
    "tokens_from_bytes",
]
