"""Rows of a file, and the kinds of columns that hold their documents.

    arrow values --check_type, convert--> contents --> Row: content, or the error of this row
    JSON value   --from_json------------> content  -'

    data.text_column     TextColumn     strings: each value is the text of a document
    data.tokens_column   TokensColumn   lists of integers: the tokens of a document

    list of ids --integers, in the vocabulary?--> end-of-sequence token removed, if it is last --> document

A format of rows (parquet, arrow, jsonl) exists once for all kinds of columns: it finds the values, and the kind knows
what they mean. To add a kind, write its class here and add it to ``COLUMN_KINDS``.

A problem of a file raises a DataError that names the file, the position and a remedy. A problem of one row is returned
as a row without content and with an error, because the rows after it can be read.

Token ids are those of data.tokenizer.path. They are taken as they are but for an end-of-sequence token at the end,
which every document gets when samples are made. A begin-of-sequence token stays, since hlat puts none in front of a
document.
"""

import errno
import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from hlat.data.documents import Content, Vocabulary
from hlat.data.formats.streams import MAX_LINE_BYTES, DamagedStream, LongWindowError
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import escape_name, listed

_MAX_NAMES = 20  # column names that a message lists


class InputFile(NamedTuple):
    """A local file, and everything that reading its documents may need."""

    path: Path
    column: str  # column or key of its documents; ignored by formats without columns
    # Vocabulary of the given tokenizer; None if the tokenizer is trained on the corpus.
    vocabulary: Vocabulary | None = None
    companion: Path | None = None  # the file that belongs to it, for formats of two files; None for the one next to it
    stays: bool = True  # True for a file of the user, which may be kept open; False for one that a cache has to delete

    @property
    def known_ids(self) -> Vocabulary:
        """The vocabulary, of a file of tokens."""
        assert self.vocabulary is not None, "files of tokens are refused unless a tokenizer is given"
        return self.vocabulary


class RowError(NamedTuple):
    """The reason why a row cannot be read, and what would help."""

    line: int | None  # line number of the row in the file, from 1; None if rows are not lines
    reason: str  # the problem
    remedy: str  # a sentence that says how to fix it


class Row(NamedTuple):
    """One document of a file, or the reason why there is none."""

    row: int  # index in the file, from 0
    # The text, or the tokens if the file contains tokens; None if the column is null or the row is bad.
    content: Content | None
    position: int  # approximate number of bytes of the file read so far, for progress
    error: RowError | None = None  # the problem of a bad row; None for a good row


def make_row(row: int, content: Content | RowError | None, position: int) -> Row:
    """Make a good row from a content or a null, or a bad row from an error."""
    return Row(row, None, position, content) if isinstance(content, RowError) else Row(row, content, position)


@contextmanager
def convert_file_errors(file: Path, kind: str) -> Iterator[None]:
    """Convert exceptions of the reading libraries, and of the disk, into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except PermissionError as error:
        raise DataError(f"{file}: permission denied; make the file readable") from error
    except (EOFError, zlib.error, DamagedStream, LongWindowError, pa.ArrowException, OSError) as error:
        raise _unreadable(file, kind, error) from error


# What the libraries say of bytes after the end of compressed data; the beginning was checked before.
_APPENDED = ("Not a gzipped file", "Unknown frame descriptor")


_OTHER_DICTIONARY, _LIKE_DICTIONARY = "Dictionary mismatch", "Data corruption detected"
_WITH_DICTIONARY = "Decompress it with its dictionary: zstd -d -D DICTIONARY FILE."


def _unreadable(file: Path, kind: str, error: Exception) -> DataError:
    reason = str(error).strip().rstrip(".").splitlines()[0] if str(error).strip() else type(error).__name__
    again = "It is truncated or damaged: fetch or write the file again."
    # The file is damaged, unless the library or the disk is the reason: then it may be whole.
    match error:
        case LongWindowError():
            reason = "compressed with a window of more than 128 MiB (zstd --long), which hlat does not read"
            again = "The file may be whole. Write it with a smaller one: zstd -d --long=31 -c FILE | zstd -o NEW.zst."
        case EOFError() | zlib.error() | gzip.BadGzipFile() | DamagedStream():
            if any(words in str(error) for words in _APPENDED):
                reason = f"other bytes follow the compressed data: {reason}"
                again = "Remove them: decompress the file (gzip and zstd warn of the rest), and compress it again."
            elif _OTHER_DICTIONARY in str(error):
                reason, again = "compressed with a dictionary (zstd -D)", f"The file may be whole. {_WITH_DICTIONARY}"
            else:
                if _LIKE_DICTIONARY in str(error):  # data that a dictionary without a number was used for look so
                    again = f"{again} Unless it was compressed with a dictionary (zstd -D). {_WITH_DICTIONARY}"
                reason = f"the compressed data cannot be read to its end: {reason}"
        case pa.ArrowNotImplementedError() | MemoryError():
            reason = f"the {kind} file cannot be read: {reason}"
            again = "It need not be damaged: write it in a usual way (zstd or snappy, smaller row groups)."
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            return DataError(f"{file}: {error.strerror}. Raise the limit (ulimit -n), and run again.")
        case OSError(errno=int()):
            reason, again = f"cannot be read: {error.strerror}", "See to the disk or the network, and run again."
        case _:
            reason = f"the {kind} file cannot be read to its end: {reason}"
    return DataError(f"{file}: {reason}. {again}")


def missing_column(column: str, names: list[str]) -> str:
    """Describe, for messages, that there is no column of this name, and list the columns."""
    return f"no column {column!r}; it has {listed(map(escape_name, names), _MAX_NAMES) or 'none'}"


def check_names(file: InputFile, names: list[str], remedy: str) -> None:
    """Raise DataError unless exactly one of a table's columns has the name of the documents'."""
    if file.column not in names:
        raise DataError(f"{file.path}: {missing_column(file.column, names)}. {remedy}")
    if (count := names.count(file.column)) > 1:
        raise DataError(f"{file.path}: {count} columns are called {file.column!r}. Rename them.")


BATCH_ROWS = 64  # small, because a row may be large
BATCH_BYTES = 1 << 26  # approximate size of a batch of rows


class ColumnKind(ABC):
    """Meaning of the values of a column; subclass it to add a kind."""

    field: ClassVar[str]  # field of data and data.sources that names the column
    holds_tokens: ClassVar[bool]  # True if the values are token ids
    name_suffix: ClassVar[str]  # end of the names of formats that read such columns
    meaning: ClassVar[str]  # words of messages for its values,
    types: ClassVar[str]  # for types of usual columns,
    cast: ClassVar[str]  # and for the column that a file has not

    @property
    def remedy(self) -> str:
        return f"Set data.{self.field} to one of these. Or, if other rows or files have it, add it here."

    def check(self, file: InputFile, schema: pa.Schema) -> None:
        """Raise DataError unless a table has the column exactly once, with a readable type."""
        check_names(file, schema.names, self.remedy)
        found = schema.field(file.column).type
        if not self.is_readable(found):
            fitting = ", ".join(field.name for field in schema if self.is_usual(field.type))
            other = f"Set data.{self.field} to a column of {self.types} ({fitting})."
            cast = f"Cast it to {self.cast}, or leave the file out."
            raise DataError(
                f"{file.path}: column {file.column!r} holds {found}, not {self.meaning}. {other if fitting else cast}"
            )

    @abstractmethod
    def is_readable(self, column_type: pa.DataType) -> bool:
        """Return True if columns of a type can be read."""

    @abstractmethod
    def is_usual(self, column_type: pa.DataType) -> bool:
        """Return True if a message should suggest columns of a type."""

    @abstractmethod
    def convert(self, values: Any, file: InputFile) -> Iterable[Content | RowError | None]:
        """Convert values of a column, a pyarrow array of up to ``BATCH_ROWS`` rows."""

    @abstractmethod
    def from_json(self, value: object, file: InputFile, line: int | None) -> Content | RowError | None:
        """Convert the value of a key, as json.loads returns it; ``line`` is its line number from 1, None if unknown."""

    def rows(
        self, columns: Iterable[Any], file: InputFile, first: int, start: int, position: Callable[[int], int]
    ) -> Iterator[Row]:
        """Yield the rows of a column from row ``start`` on.

        ``columns`` has the column of each of the table's batches, pyarrow arrays; ``first`` is the index of the first
        row of the first batch; ``position`` gives the bytes of the file read after so many rows.
        """
        for values in columns:
            # Rows before the start are sliced off before they are converted: a restart skips them at no cost.
            skip = min(max(start - first, 0), len(values))
            for begin in range(skip, len(values), BATCH_ROWS):
                for row, content in enumerate(self.convert(values.slice(begin, BATCH_ROWS), file), first + begin):
                    yield make_row(row, content, position(row + 1))
            first += len(values)


_REPAIR_ROW = "Repair or remove the row."


class TextColumn(ColumnKind):
    """A column of strings, which may be dictionary-encoded in a table, or bytes of UTF-8 (old Spark, Impala)."""

    field = "text_column"
    holds_tokens = False
    name_suffix = ""
    meaning, types, cast = "text", "strings", "a column of strings (this file has none)"

    def is_readable(self, column_type: pa.DataType) -> bool:
        value = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
        return self.is_usual(value) or bool(
            pa.types.is_string_view(value) or _is_bytes(value) or pa.types.is_null(value)
        )

    def is_usual(self, column_type: pa.DataType) -> bool:
        return bool(pa.types.is_string(column_type) or pa.types.is_large_string(column_type))

    def convert(self, values: Any, file: InputFile) -> Iterable[Content | RowError | None]:
        is_dictionary = pa.types.is_dictionary(values.type)
        # In a dictionary column, every row of the batch can refer to the largest value.
        max_bytes = BATCH_BYTES // BATCH_ROWS if is_dictionary else BATCH_BYTES
        if values.nbytes > max_bytes or _is_bytes(values.type.value_type if is_dictionary else values.type):
            return map(_text, values)
        try:
            # All at once, which is faster; one by one only where a value may be bad or too large.
            return list(values.to_pylist())
        except UnicodeDecodeError:
            return map(_text, values)

    def from_json(self, value: object, file: InputFile, line: int | None) -> Content | RowError | None:
        if value is None:
            return None
        if not isinstance(value, str):
            remedy = "Set data.text_column to a key of strings."
            found = _JSON_TYPES.get(type(value), "a number")
            return RowError(line, f"{file.column!r} holds {found}, not text", remedy)
        return _lone_surrogate(value, line) or value


def _text(value: Any) -> str | RowError | None:
    plain = value.value if isinstance(value, pa.DictionaryScalar) else value
    # The length is looked at before the text is copied.
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
    """Return an error for half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X})"
        return RowError(line, f"{half}, which is not text", "Repair or remove the line.")
    return None


_JSON_TYPES = {dict: "an object", list: "a list", bool: "a boolean", str: "a text", float: "a fraction"}


TEXT_COLUMN = TextColumn()


_REPAIR_TOKENS = "Each must be a list of token ids, such as [17, 4, 256]: repair or remove the row."
_ID_BYTES = 4


class TokensColumn(ColumnKind):
    """A column of lists of integers of any width, the ids of data.tokenizer.path."""

    field = "tokens_column"
    holds_tokens = True
    name_suffix = "-tokens"
    meaning, types, cast = "lists of token ids", "lists of integers", "lists of integers (no column has them)"

    def is_readable(self, column_type: pa.DataType) -> bool:
        types = pa.types
        # Lists that are all empty, and columns of nothing but nulls, have no integer type.
        is_list = _is_list(column_type)
        return self.is_usual(column_type) or bool(types.is_null(column_type.value_type if is_list else column_type))

    def is_usual(self, column_type: pa.DataType) -> bool:
        return _is_list(column_type) and bool(pa.types.is_integer(column_type.value_type))

    def convert(self, values: Any, file: InputFile) -> Iterator[Content | RowError | None]:
        for value in values:
            yield _from_arrow(value.values, file) if value.is_valid else None

    def from_json(self, value: object, file: InputFile, line: int | None) -> Content | RowError | None:
        if value is None:
            return None
        if not isinstance(value, list):
            reason = f"{file.column!r} holds {_JSON_TYPES.get(type(value), 'a number')}, not a list of token ids"
            return RowError(line, reason, "Set data.tokens_column to a key of lists of integers.")
        for index, number in enumerate(value):
            if type(number) is not int:  # not isinstance: a boolean is an int for Python
                found = "null" if number is None else _JSON_TYPES.get(type(number), "a number")
                return RowError(line, f"{file.column!r}: its entry {index} is {found}, not a token id", _REPAIR_TOKENS)
            if not 0 <= number < file.known_ids.size:
                return _unknown_id(file, index, number, line)
        return file.known_ids.document(np.array(value, dtype=np.int64))


def _is_list(column_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type))


def _from_arrow(ids: Any, file: InputFile) -> Content | RowError:
    if len(ids) * _ID_BYTES > MAX_LINE_BYTES:  # the same limit in bytes as for a text
        reason = f"{file.column!r} holds {len(ids):,} token ids; a document may have {MAX_LINE_BYTES // _ID_BYTES:,}"
        return RowError(None, reason, "Cut it into several rows.")
    if ids.null_count:
        index = ids.is_null().index(pa.scalar(True)).as_py()
        return RowError(None, f"{file.column!r}: its entry {index} is null, not a token id", _REPAIR_TOKENS)
    array = ids.cast(pa.int64()).to_numpy() if pa.types.is_null(ids.type) else ids.to_numpy(zero_copy_only=False)
    if (index := file.known_ids.first_unknown(array)) is not None:
        return _unknown_id(file, index, int(array[index]), None)
    return file.known_ids.document(array)


def _unknown_id(file: InputFile, index: int, found: int, line: int | None) -> RowError:
    # Python refuses to print integers of thousands of digits.
    shown = str(found) if abs(found) < 1 << 64 else "far outside"
    reason = (
        f"{file.column!r}: its token {index} has the id {shown}, but the ids of data.tokenizer.path are 0 to "
        f"{file.known_ids.size - 1}"
    )
    return RowError(line, reason, "Give the tokenizer that made the ids.")


TOKENS_COLUMN = TokensColumn()


# All kinds. If a section of a recipe names columns of several kinds, the first of these counts.
COLUMN_KINDS: tuple[ColumnKind, ...] = (TOKENS_COLUMN, TEXT_COLUMN)
