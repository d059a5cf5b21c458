"""Columns of strings: each value is the text of a document."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from hlat.data.formats.columns.base import BATCH_BYTES, BATCH_ROWS, ColumnKind
from hlat.data.formats.document import Content
from hlat.data.formats.records import InputFile, RowError
from hlat.data.formats.streams.line_reading import MAX_LINE_BYTES

_REPAIR_ROW = "Repair or remove the row."


class TextColumn(ColumnKind):
    """A column of strings, which may be dictionary-encoded in a table, or bytes of UTF-8 (old Spark, Impala)."""

    field = "text_column"
    holds_tokens = False
    name_suffix = ""

    def is_readable(self, column_type: pa.DataType) -> bool:
        """Return True for strings of any kind, also dictionary-encoded ones, for bytes, and for nothing but nulls."""
        value = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
        return self.is_usual(value) or bool(
            pa.types.is_string_view(value) or _is_bytes(value) or pa.types.is_null(value)
        )

    def is_usual(self, column_type: pa.DataType) -> bool:
        """Return True for the two usual types of strings."""
        return bool(pa.types.is_string(column_type) or pa.types.is_large_string(column_type))

    def wrong_type(self, fitting: list[str]) -> str:
        """Describe that the column must hold strings."""
        columns = ", ".join(fitting) or "this file has none"
        return f"not text. Set data.text_column to a column of strings ({columns})."

    def convert(self, values: Any, file: InputFile) -> Iterable[Content | RowError | None]:
        """Convert values to texts: all at once if they are small and valid UTF-8, otherwise one by one."""
        del file
        is_dictionary = pa.types.is_dictionary(values.type)
        # In a dictionary column, every row of the batch can refer to the largest value.
        max_bytes = BATCH_BYTES // BATCH_ROWS if is_dictionary else BATCH_BYTES
        if values.nbytes > max_bytes or _is_bytes(values.type.value_type if is_dictionary else values.type):
            return map(_text, values)
        try:
            return list(values.to_pylist())
        except UnicodeDecodeError:
            return map(_text, values)

    def from_json(self, value: object, file: InputFile, line: int | None) -> Content | RowError | None:
        """Return a string that UTF-8 can encode, or null."""
        if value is None:
            return None
        if not isinstance(value, str):
            remedy = "Set data.text_column to a key of strings."
            return RowError(line, f"{file.column!r} holds {_json_type(value)}, not text", remedy)
        return _lone_surrogate(value, line) or value


def _text(value: Any) -> str | RowError | None:
    """Convert one value to text; return an error for a too long one or one that is not UTF-8."""
    plain = value.value if isinstance(value, pa.DictionaryScalar) else value
    buffer = plain.as_buffer() if plain is not None and plain.is_valid else None
    if buffer is not None and buffer.size > MAX_LINE_BYTES:
        reason = f"a text of {buffer.size:,} bytes; a document may have {MAX_LINE_BYTES:,}"
        return RowError(None, reason, "Cut it into several rows.")
    try:
        text: str | bytes | None = value.as_py()
        return text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        return RowError(None, f"invalid UTF-8 at byte {error.start} of the text ({error.reason})", _REPAIR_ROW)


def _is_bytes(column_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(column_type) or types.is_large_binary(column_type) or types.is_binary_view(column_type))


def _lone_surrogate(text: str, line: int | None) -> RowError | None:
    """Return an error if a text contains half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X})"
        return RowError(line, f"{half}, which is not text", "Repair or remove the line.")
    return None


def _json_type(value: object) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean"}.get(type(value), "a number")


TEXT_COLUMN = TextColumn()
