"""Join the .bin and .idx files of Megatron-LM datasets to one file of the corpus: the .bin with its ``index``.

a.bin  a.idx  b.bin --> a.bin (a.idx), b.bin (b.idx, searched next to it)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hlat.data.formats import index_path
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores import url_file_name
from hlat.runtime import DataError, is_url

TWO_FILES = "A Megatron-LM dataset consists of two files with the same name, .bin and .idx"


def pair_indexes(files: Sequence[SourceFile], find_index: Callable[[str], SourceFile | None]) -> list[SourceFile]:
    """Return the files of a source in their order, with each .idx attached to its .bin.

    Args:
        files: the listed files.
        find_index: finds an .idx that is not among the files by its path; returns None if it does not exist.

    Raises:
        DataError: a .bin has no .idx, or an .idx has no .bin.
    """
    indexes = {file.path: file for file in files if _has_suffix(file, ".idx")}
    pairs = []
    for file in files:
        if _has_suffix(file, ".bin"):
            path = _index_path(file.path)
            index = indexes.pop(path, None) or find_index(path)
            if index is None:
                raise DataError(f"{file.path}: {path} is missing. {TWO_FILES}; hlat reads no other .bin files.")
            pairs.append(replace(file, index=index))
        elif not _has_suffix(file, ".idx"):
            pairs.append(file)
    for path in indexes:
        raise DataError(
            f"{path}: its .bin, which contains the tokens, is not in the source. {TWO_FILES}: name the .bin."
        )
    return pairs


def _has_suffix(file: SourceFile, suffix: str) -> bool:
    name = url_file_name(file.path) if is_url(file.path) else file.path
    return name.lower().endswith(suffix)


def _index_path(data: str) -> str:
    """Return the path or URL of the .idx of a .bin; the query of a web URL is kept."""
    name = url_file_name(data) if is_url(data) else data
    head, _, tail = data.rpartition(name)
    return head + index_path(name) + tail
