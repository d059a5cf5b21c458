"""Columns of documents: values of a table or of JSON -> contents, one file per kind of column.

data.text_column     text     strings
data.tokens_column   tokens   lists of token ids
"""

from hlat.data.formats.columns.base import BATCH_BYTES, BATCH_ROWS, ColumnKind
from hlat.data.formats.columns.text import TEXT_COLUMN
from hlat.data.formats.columns.tokens import TOKENS_COLUMN

COLUMN_KINDS: tuple[ColumnKind, ...] = (TOKENS_COLUMN, TEXT_COLUMN)
"""All kinds. If a section of a recipe names columns of several kinds, the first of these counts."""

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "COLUMN_KINDS", "TEXT_COLUMN", "TOKENS_COLUMN", "ColumnKind"]
