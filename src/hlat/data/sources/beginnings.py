"""Read a little text of a corpus: the beginnings of a few of its local files.

files --a few, evenly spread--> first rows, or first bytes of a file that is one document --> texts
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hlat.data.formats.records import convert_file_errors
from hlat.data.formats.streams.decompression import open_decompressed
from hlat.data.sources.source_file import SourceFile
from hlat.runtime.errors import DataError

_FILES, _ROWS, _CHARS = 8, 8, 1 << 14


def read_beginnings(files: Sequence[SourceFile]) -> list[str]:
    """Return texts of a corpus; nothing of files in object stores, of token ids, or that cannot be read."""
    local = [file for file in files if file.cached_store is None and not file.format.holds_tokens]
    texts: list[str] = []
    for file in local[:: max(1, -(-len(local) // _FILES))]:
        with suppress(DataError):  # whoever prepares the file reports it
            texts += islice(_texts(file), _ROWS)
    return texts


def _texts(file: SourceFile) -> Iterator[str]:
    path = Path(file.path)
    if file.format.is_one_document:
        with convert_file_errors(path, file.format.kind), path.open("rb") as raw:
            yield open_decompressed(path, raw).read(_CHARS).decode(errors="ignore")
        return
    with file.as_input(path, None) as opened:
        for row in file.format.documents(opened):
            if isinstance(row.content, str) and row.content:
                yield row.content[:_CHARS]
