"""The protocol of a kind of column, and the rows of a column of a table.

    arrow values --check_type, convert--> contents --> rows
    JSON value   --from_json------------> content

A format of rows (parquet, arrow, jsonl) exists once per kind of column; it finds the values, and the kind knows what
they mean.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pyarrow as pa

from hlat.data.formats.document import Content
from hlat.data.formats.records import InputFile, Row, RowError, make_row, missing_column, same_columns
from hlat.runtime.errors import DataError

BATCH_ROWS = 64  # small, because a row may be large
BATCH_BYTES = 1 << 26  # approximate size of a batch of rows


class ColumnKind(ABC):
    """Meaning of the values of a column.

    Attributes:
        field: field of data and data.sources that names the column.
        holds_tokens: True if the values are token ids.
        name_suffix: end of the names of formats that read such columns.
    """

    field: ClassVar[str]
    holds_tokens: ClassVar[bool]
    name_suffix: ClassVar[str]

    @property
    def remedy(self) -> str:
        """A sentence for the message that a column does not exist."""
        return f"Set data.{self.field} to one of these."

    def check(self, file: InputFile, schema: pa.Schema) -> None:
        """Check that a table has the column, and that its type is right.

        Raises:
            DataError: it does not, or it is not.
        """
        if file.column not in schema.names:
            raise DataError(f"{file.path}: {missing_column(file.column, schema.names)}. {self.remedy}")
        if (count := schema.names.count(file.column)) > 1:
            raise DataError(f"{file.path}: {same_columns(file.column, count)}")
        found = schema.field(file.column).type
        if not self.is_readable(found):
            fitting = [field.name for field in schema if self.is_usual(field.type)]
            raise DataError(f"{file.path}: column {file.column!r} holds {found}, {self.wrong_type(fitting)}")

    @abstractmethod
    def is_readable(self, column_type: pa.DataType) -> bool:
        """Return True if columns of a type can be read."""

    @abstractmethod
    def is_usual(self, column_type: pa.DataType) -> bool:
        """Return True if a message should suggest columns of a type."""

    @abstractmethod
    def wrong_type(self, fitting: list[str]) -> str:
        """Describe what a column should hold and what would work; ``fitting`` are the columns that hold it."""

    @abstractmethod
    def convert(self, values: Any, file: InputFile) -> Iterable[Content | RowError | None]:
        """Convert values of a column, a pyarrow array of up to ``BATCH_ROWS`` rows."""

    @abstractmethod
    def from_json(self, value: object, file: InputFile, line: int | None) -> Content | RowError | None:
        """Convert the value of a key.

        Args:
            value: the value, as json.loads returns it.
            file: its file.
            line: its line number in the file, from 1; None if unknown.
        """

    def rows(
        self, columns: Iterable[Any], file: InputFile, first: int, start: int, position: Callable[[int], int]
    ) -> Iterator[Row]:
        """Yield the rows of a column from row ``start`` on.

        Args:
            columns: the column of each of the table's batches, pyarrow arrays.
            file: its file.
            first: index of the first row of the first batch.
            start: index of the first row to yield.
            position: bytes of the file read after so many rows.
        """
        for values in columns:
            skip = min(max(start - first, 0), len(values))
            for begin in range(skip, len(values), BATCH_ROWS):
                for row, content in enumerate(self.convert(values.slice(begin, BATCH_ROWS), file), first + begin):
                    yield make_row(row, content, position(row + 1))
            first += len(values)
