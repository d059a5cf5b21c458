"""A file -> its documents, one at a time, in order: parquet, arrow, jsonl (plain, .gz, .zst) and text.

    endings -> tables (parquet, arrow) or lines (jsonl, text) -> records

Memory is bounded by one document and one record batch. Nothing is skipped silently: null texts come out as None, to be
counted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from hlat.data.formats.file_types import ARROW, JSON, PARQUET, TEXT, file_type
from hlat.data.formats.json_lines import read_json, read_text
from hlat.data.formats.records import Row, convert_file_errors
from hlat.data.formats.tables import read_arrow, read_parquet
from hlat.runtime import DataError


def read_documents(file: Path, column: str, start: int = 0) -> Iterator[Row]:
    """The documents of a file from row ``start`` on.

    Args:
        file: the file; its ending says how it is read, and that it is of text.
        column: column or key of the text; text files have none and are one document each.
        start: the first row wanted.

    Raises:
        DataError: the file is missing, empty, damaged or truncated, or has no column of text of this name. What is
            wrong with a single row is said by the row.
    """
    readers: dict[str, Callable[[Path, str, int], Iterator[Row]]]
    readers = {PARQUET: read_parquet, ARROW: read_arrow, JSON: read_json, TEXT: read_text}
    kind = file_type(file)
    with convert_file_errors(file):
        if kind != TEXT and file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty (0 bytes); restore it, or leave it out of the source")
        yield from readers[kind](file, column, start)
