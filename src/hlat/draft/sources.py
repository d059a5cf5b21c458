"""Sources of a corpus that is several paths, or a folder of several formats: one for each path and ending.

path --list_files--> files of one format --> the path itself
--> of several          --> a glob for each ending: folder/**/*.csv, folder/**/*.jsonl.zst
many paths with files of one ending, of which the common folder has no others --> one glob below that folder
"""

import glob
import itertools
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hlat.config import DataConfig
from hlat.data import file_ending, find_files, is_read, list_files
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import plural

MOST_SOURCES = 16
"""Sources that a draft lists; more are joined to globs, and otherwise refused."""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class SourcePath(NamedTuple):
    """A path or glob for a source of a recipe, and its files."""

    path: str
    files: tuple[str, ...]


def source_paths(paths: Sequence[str]) -> tuple[list[SourcePath], list[str]]:
    """Return the sources of a corpus, and the files of mixed folders that are in none.

    Raises:
        DataError: there are no files, files that cannot be used, or more sources than a draft lists.
    """
    found, left_out = list[SourcePath](), list[str]()
    for path in dict.fromkeys(paths):
        sources, others = _of_path(path)
        found += sources
        left_out += others
    if len(found) > MOST_SOURCES:
        found = _joined(found)
    if len(found) > MOST_SOURCES:
        first = ", ".join(source.path for source in found[:3])
        raise DataError(
            f"{first} and {len(found) - 3} more: more than the {MOST_SOURCES} sources that are drafted. Name a folder "
            "that holds nothing else, or a glob in quotes, as in 'texts/a*'."
        )
    return found, left_out


def source_names(sources: Sequence[SourcePath]) -> list[str]:
    """Name the sources after their paths, each name once."""
    names = list[str]()
    for path, files in sources:
        fixed = path.partition("*")[0].rstrip("/") if glob.has_magic(path) else path.rstrip("/")
        stem = Path(fixed).name.partition(".")[0] or Path(Path(fixed).resolve()).name
        ending = file_ending(files[0]) if fixed != path.rstrip("/") else ""
        name = _NOT_IN_A_NAME.sub("-", stem + ending.replace(".", "-")).strip("-.") or "texts"
        numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        names.append(next(each for each in numbered if each not in names))
    return names


def _of_path(path: str) -> tuple[list[SourcePath], list[str]]:
    try:
        with tempfile.TemporaryDirectory() as folder:  # for the cache of remote files
            listed = list_files(DataConfig(path=path), Path(folder))
    except DataError:
        if not Path(path).is_dir():
            raise
        names = [str(file) for file in find_files(path)[0]]
        sources, left_out = _by_ending(path, names)
        if len(sources) < 2:  # not because formats are mixed
            raise
        return sources, left_out
    names = [file.path for file in listed]
    if len({file.format.kind for file in listed}) == 1 or glob.has_magic(path):
        return [SourcePath(path, tuple(names))], []
    return _by_ending(path, names)


def _by_ending(folder: str, files: Sequence[str]) -> tuple[list[SourcePath], list[str]]:
    """Divide the files of a folder by their endings; those without one or of no format that hlat reads are left out."""
    by_ending = dict[str, list[str]]()
    left_out = list[str]()
    for file in files:
        ending = file_ending(file)
        if ending and is_read(file):
            by_ending.setdefault(ending, []).append(file)
        else:
            left_out.append(file)
    root = glob.escape(folder.rstrip("/"))
    return [SourcePath(f"{root}/**/*{ending}", tuple(found)) for ending, found in sorted(by_ending.items())], left_out


def _joined(sources: Sequence[SourcePath]) -> list[SourcePath]:
    """Join sources of the same ending where the folder above them has no other files of it."""
    by_ending = dict[str, list[SourcePath]]()
    for source in sources:
        endings = {file_ending(file) for file in source.files}
        by_ending.setdefault(endings.pop() if len(endings) == 1 else "", []).append(source)
    found = list[SourcePath]()
    for ending, same in by_ending.items():
        files = sorted(file for source in same for file in source.files)
        above = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120 - of URLs too
        pattern = f"{glob.escape(above or '.')}/**/*{ending}"
        is_local = not any("://" in file for file in files)
        if ending and len(same) > 1 and is_local and sorted(map(str, find_files(pattern)[0])) == files:
            found.append(SourcePath(pattern, tuple(files)))
        else:
            found += same
    return found


def left_out_line(files: Sequence[str]) -> str:
    """Describe files that are in no source, as a comment of a recipe: three, and how many more."""
    shown = ", ".join(Path(file).name for file in files[:3])
    return f"  # {plural(len(files), 'file')} in no source: {shown}{f' and {len(files) - 3} more' if files[3:] else ''}"
