"""Join files that consist of two to one file of the corpus: the first, with the second as its ``index``.

a.bin  a.idx  b.bin --> a.bin (a.idx), b.bin (b.idx, searched next to it)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hlat.data.formats.base import Companion
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores.remote import url_file_name
from hlat.runtime.errors import DataError
from hlat.runtime.urls import is_url


def join_companions(
    files: Sequence[SourceFile], find: Callable[[SourceFile, str], SourceFile | None]
) -> list[SourceFile]:
    """Return the files of a source in their order, with each companion attached to its file.

    Args:
        files: the listed files.
        find: finds the companion of a file that is not listed, by its path; returns None if it does not exist.

    Raises:
        DataError: a file has no companion, or a companion has no file.
    """
    listed = {file.path: (file, file.format.companion) for file in files}
    found = {path: file for path, (file, pair) in listed.items() if pair is not None and _ends(path, pair.ending)}
    joined = []
    for file, pair in listed.values():
        if pair is None:
            joined.append(file)
        elif _ends(file.path, pair.main):
            path = _companion_path(file.path, pair)
            companion = found.pop(path, None) or find(file, path)
            if companion is None:
                raise DataError(f"{file.path}: {path} is missing. {pair.rule}; hlat reads no other {pair.main} files.")
            joined.append(replace(file, index=companion))
    for path, file in found.items():
        pair = file.format.companion
        assert pair is not None, "only files of such formats were collected"
        raise DataError(
            f"{path}: its {pair.main}, which contains the tokens, is not in the source. {pair.rule}: name the "
            f"{pair.main}."
        )
    return joined


def _ends(path: str, ending: str) -> bool:
    name = url_file_name(path) if is_url(path) else path
    return name.lower().endswith(ending)


def _companion_path(main: str, pair: Companion) -> str:
    """Return the path or URL of the companion of a file; the query of a web URL is kept."""
    name = url_file_name(main) if is_url(main) else main
    head, _, tail = main.rpartition(name)
    return head + pair.path(name) + tail
