"""File formats: the bytes of a file become rows, and rows become documents."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.formats.document import C, Content, as_bytes, as_tokens, text_bytes, tokens_of
    from hlat.data.formats.file_types import ARROW, JSON, MEGATRON, PARQUET, TEXT, kind_of
    from hlat.data.formats.json_lines import read_lines
    from hlat.data.formats.megatron import MegatronDataset, index_of
    from hlat.data.formats.readers import read_documents
    from hlat.data.formats.records import Fault, Row
    from hlat.data.formats.tables import group_rows, read_group, rows_of_group
    from hlat.data.formats.token_documents import TokenDocuments, Vocabulary

__getattr__ = lazily(
    __name__,
    {
        "document": (
            "C",
            "Content",
            "as_bytes",
            "as_tokens",
            "text_bytes",
            "tokens_of",
        ),
        "file_types": (
            "ARROW",
            "JSON",
            "MEGATRON",
            "PARQUET",
            "TEXT",
            "kind_of",
        ),
        "json_lines": ("read_lines",),
        "megatron": (
            "MegatronDataset",
            "index_of",
        ),
        "readers": ("read_documents",),
        "records": (
            "Fault",
            "Row",
        ),
        "tables": (
            "group_rows",
            "read_group",
            "rows_of_group",
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
    "C",
    "Content",
    "Fault",
    "MegatronDataset",
    "Row",
    "TokenDocuments",
    "Vocabulary",
    "as_bytes",
    "as_tokens",
    "group_rows",
    "index_of",
    "kind_of",
    "read_documents",
    "read_group",
    "read_lines",
    "rows_of_group",
    "text_bytes",
    "tokens_of",
]
