"""Megatron-LM's .bin and .idx, found as two files, become one of the corpus: the .bin, which knows its .idx.

a.bin  a.idx  b.bin --> a.bin (a.idx), b.bin (b.idx, looked for beside it)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hlat.data.formats import index_path
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores import url_file_name
from hlat.runtime import DataError, is_url

TWO_FILES = "A Megatron-LM dataset consists of two files with the same name, .bin and .idx"


def pair_indexes(files: Sequence[SourceFile], beside: Callable[[str], SourceFile | None]) -> list[SourceFile]:
    """The files of a source, in their order, each .idx with its .bin.

    Args:
        files: what was found.
        beside: finds the .idx that was not asked for; None where there is none.

    Raises:
        DataError: one of the two is missing.
    """
    indexes = {file.path: file for file in files if _ends(file, ".idx")}
    pairs = []
    for file in files:
        if _ends(file, ".bin"):
            place = _index_at(file.path)
            index = indexes.pop(place, None) or beside(place)
            if index is None:
                raise DataError(f"{file.path}: {place} is missing. {TWO_FILES}; a .bin of another kind is not read.")
            pairs.append(replace(file, index=index))
        elif not _ends(file, ".idx"):
            pairs.append(file)
    for lone in indexes:
        raise DataError(f"{lone}: its .bin, which holds the tokens, is not in the source. {TWO_FILES}: name the .bin.")
    return pairs


def _ends(file: SourceFile, ending: str) -> bool:
    name = url_file_name(file.path) if is_url(file.path) else file.path
    return name.lower().endswith(ending)


def _index_at(data: str) -> str:
    """The .idx of a .bin; a query of a URL of the web stays where it is."""
    name = url_file_name(data) if is_url(data) else data
    head, _, tail = data.rpartition(name)
    return head + index_path(name) + tail
