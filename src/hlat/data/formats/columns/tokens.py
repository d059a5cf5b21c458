"""Columns of token ids: each value is a list of integers, the tokens of a document.

    list of ids --integers, in the vocabulary?--> end-of-sequence token removed, if it is last --> document

The ids are those of data.tokenizer.path. They are taken as they are but for an end-of-sequence token at the end, which
every document gets when samples are made. A begin-of-sequence token stays, since hlat puts none in front of a document.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from hlat.data.formats.columns.base import ColumnKind
from hlat.data.formats.document import Content
from hlat.data.formats.records import InputFile, RowError
from hlat.data.formats.streams.line_reading import MAX_LINE_BYTES

_REPAIR = "Each must be a list of token ids, such as [17, 4, 256]: repair or remove the row."
_JSON_TYPES = {dict: "an object", list: "a list", bool: "a boolean", str: "a text", float: "a fraction"}
_ID_BYTES = 4


class TokensColumn(ColumnKind):
    """A column of lists of integers of any width."""

    field = "tokens_column"
    holds_tokens = True
    name_suffix = "-tokens"

    def is_readable(self, column_type: pa.DataType) -> bool:
        """Return True for lists of integers; for lists that are all empty, and for nothing but nulls."""
        types = pa.types
        is_list = _is_list(column_type)
        return self.is_usual(column_type) or bool(types.is_null(column_type.value_type if is_list else column_type))

    def is_usual(self, column_type: pa.DataType) -> bool:
        """Return True for lists of integers."""
        return _is_list(column_type) and bool(pa.types.is_integer(column_type.value_type))

    def wrong_type(self, fitting: list[str]) -> str:
        """Describe that the column must hold lists of integers."""
        columns = ", ".join(fitting) or "this file has none"
        return f"not lists of token ids. Set data.tokens_column to a column of lists of integers ({columns})."

    def convert(self, values: Any, file: InputFile) -> Iterator[Content | RowError | None]:
        """Yield the tokens of each list, uint32."""
        for value in values:
            yield _from_arrow(value.values, file) if value.is_valid else None

    def from_json(self, value: object, file: InputFile, line: int | None) -> Content | RowError | None:
        """Return the tokens of a list, uint32, or null."""
        if value is None:
            return None
        if not isinstance(value, list):
            reason = f"{file.column!r} holds {_JSON_TYPES.get(type(value), 'a number')}, not a list of token ids"
            return RowError(line, reason, "Set data.tokens_column to a key of lists of integers.")
        for index, number in enumerate(value):
            if type(number) is not int:
                found = "null" if number is None else _JSON_TYPES.get(type(number), "a number")
                return RowError(line, f"{file.column!r}: its entry {index} is {found}, not a token id", _REPAIR)
            if not 0 <= number < file.known_ids.size:
                return _unknown_id(file, index, number, line)
        return file.known_ids.document(np.array(value, dtype=np.int64))


def _is_list(column_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type))


def _from_arrow(ids: Any, file: InputFile) -> Content | RowError:
    """Convert one list, an arrow array of integers."""
    if len(ids) * _ID_BYTES > MAX_LINE_BYTES:
        reason = f"{file.column!r} holds {len(ids):,} token ids; a document may have {MAX_LINE_BYTES // _ID_BYTES:,}"
        return RowError(None, reason, "Cut it into several rows.")
    if ids.null_count:
        index = ids.is_null().index(pa.scalar(True)).as_py()
        return RowError(None, f"{file.column!r}: its entry {index} is null, not a token id", _REPAIR)
    array = ids.cast(pa.int64()).to_numpy() if pa.types.is_null(ids.type) else ids.to_numpy(zero_copy_only=False)
    if (index := file.known_ids.first_unknown(array)) is not None:
        return _unknown_id(file, index, int(array[index]), None)
    return file.known_ids.document(array)


def _unknown_id(file: InputFile, index: int, found: int, line: int | None) -> RowError:
    shown = str(found) if abs(found) < 1 << 64 else "far outside"
    reason = (
        f"{file.column!r}: its token {index} has the id {shown}, but the ids of data.tokenizer.path are 0 to "
        f"{file.known_ids.size - 1}"
    )
    return RowError(line, reason, "Give the tokenizer that made the ids.")


TOKENS_COLUMN = TokensColumn()
