"""Read the documents of a file, one at a time and in order: parquet, arrow, jsonl (plain, .gz, .zst) and text.

    suffix -> tables (parquet, arrow) or lines (jsonl, text) -> rows

Memory is bounded by one document and one record batch. Nothing is skipped silently: a null text is a row with content
None, which the caller counts.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from hlat.data.formats.file_types import ARROW, JSON, PARQUET, TEXT, file_type
from hlat.data.formats.json_lines import read_json, read_text
from hlat.data.formats.records import Row, convert_file_errors
from hlat.data.formats.tables import read_arrow, read_parquet
from hlat.runtime import DataError


def read_documents(file: Path, column: str, start: int = 0) -> Iterator[Row]:
    """Read the documents of a file from row ``start`` on.

    Args:
        file: a file of text, not of tokens; its suffix selects the format.
        column: column or key of the text; ignored for text files, which are one document each.
        start: index of the first row to read.

    Raises:
        DataError: the file is missing, empty, damaged or truncated, or has no text column of this name. Problems of a
            single row are returned in ``Row.error``.
    """
    readers: dict[str, Callable[[Path, str, int], Iterator[Row]]]
    readers = {PARQUET: read_parquet, ARROW: read_arrow, JSON: read_json, TEXT: read_text}
    type_of_file = file_type(file)
    with convert_file_errors(file):
        if type_of_file != TEXT and file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty (0 bytes); restore it, or leave it out of the source")
        yield from readers[type_of_file](file, column, start)
