"""Findings about the files of a source: what keeps them from being the corpus that a recipe means, in one short table.

    links, names, endings --listing--> findings
    first bytes           --format---> findings --> one error

Each format says itself what is wrong with a file (``FileFormat.bad_beginning``); nothing here knows formats.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hlat.data.formats.streams.decompression import COMPRESSED_ENDINGS
from hlat.data.sources.source_file import SourceFile
from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import plural
from hlat.runtime.urls import is_url

_ROWS = 3
_OPENED_TOGETHER, _SUBMITTED = 16, 1 << 10
_SHARD = re.compile(r"[-._](\d{4,6})-of-(\d{4,6})(?:-[0-9a-f]{8,}(?=\.))?")

_TRAIN = re.compile(r"(?i)(?<![a-z])train(?![a-z])")
_ASIDE = re.compile(r"(?i)(?<![a-z])(test|valid|validation|val|dev|eval)(?![a-z])")


class FileFinding(NamedTuple):
    """A problem of a file.

    Attributes:
        path: path or URL of the file.
        problem: sentences that say what is wrong and what would work; equal ones are told once.
    """

    path: str
    problem: str

    @classmethod
    def of_error(cls, path: str, error: DataError) -> "FileFinding":
        """Return the finding that an error about a file reports."""
        return cls(path, str(error).removeprefix(f"{path}: "))


def first_bytes(files: Iterable[SourceFile], unreadable_rows: float) -> Iterator[FileFinding]:
    """Yield what the first bytes of local files show; files of stores are looked at when they have been fetched.

    Args:
        files: the files.
        unreadable_rows: the largest share of rows that may be unreadable; unless it is 0, bad documents are left out
            later, and only files that cannot be read at all are found here.
    """
    local = [file for file in files if file.cached_store is None]
    with ThreadPoolExecutor(_OPENED_TOGETHER) as pool:  # a file system over a network answers many at a time
        for start in range(0, len(local), _SUBMITTED):
            found = pool.map(lambda file: _beginning(file, unreadable_rows), local[start : start + _SUBMITTED])
            yield from filter(None, found)


def _beginning(file: SourceFile, unreadable_rows: float) -> FileFinding | None:
    try:
        bad = file.format.bad_beginning(Path(file.path))
    except DataError as error:
        return FileFinding.of_error(file.path, error)
    if bad is None or unreadable_rows:
        return None
    return FileFinding(file.path, f"{bad.reason}. {bad.remedy}")


def check_first_bytes(files: Iterable[SourceFile], unreadable_rows: float) -> None:
    """Raise a DataError with everything that the first bytes of a corpus show; before hashing, which may take hours."""
    refuse("the corpus", list(first_bytes(files, unreadable_rows)))


def doubts(files: Sequence[SourceFile]) -> list[str]:
    """Return sentences about a corpus that can be read, but of which parts seem absent, or not meant, or there twice.

    Names such as ``train-00003-of-00040`` say how many files there were.
    """
    shards, places = defaultdict[tuple[str, str, str], dict[str, str]](dict), Counter[str]()
    local = defaultdict[tuple[int, str], list[SourceFile]](list)
    for file in files:
        places[file.path if is_url(file.path) else os.path.realpath(file.path)] += 1
        if name := _SHARD.search(file.path):
            shards[file.path[: name.start()], name[2], file.path[name.end() :]][name[1]] = file.path
        if file.cached_store is None:
            local[file.source, file.format.name].append(file)
    rows = [
        f"{plural(int(count) - len(found), 'file')} of {int(count):,} absent, by names like {min(found.values())}."
        for (_, count, _), found in shards.items()
        if len(found) < int(count)
    ]
    rows += filter(None, (found[0].format.doubt([Path(file.path) for file in found]) for found in local.values()))
    rows += _held_out_names(files)
    packed = [file.path for file in files if file.path.endswith(COMPRESSED_ENDINGS)]
    if beside := [path for path in packed if str(Path(os.path.realpath(path)).with_suffix("")) in places]:
        rows.append(f"{beside[0]}{_more(beside)}: the same file uncompressed is beside it, and both are read.")
    if twice := [place for place, times in places.items() if times > 1]:
        rows.append(f"{twice[0]}{_more(twice)}: named more than once, and read as often.")
    return rows if len(rows) <= _ROWS else [*rows[:_ROWS], f"And {len(rows) - _ROWS} more like these."]


def _held_out_names(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield a sentence for each source of which some files are named train, and others as text that is kept aside."""
    sources = defaultdict[int, list[str]](list)
    for file in files:
        if not file.is_validation:
            sources[file.source].append(file.path)
    for paths in sources.values():
        start = os.path.commonprefix(paths).rpartition("/")[0]  # noqa: RUF071 - the folder above all says nothing
        aside = [path for path in paths if _ASIDE.search(path, len(start))]
        meant = next(filter(None, (_TRAIN.search(path, len(start)) for path in paths)), None)
        if aside and len(aside) < len(paths) and meant:
            named, rest = meant.string[: meant.end()], meant.string[meant.end() :]
            advice = (
                f"To leave them out, name the others with a glob, such as {named}{'/**' if rest[:1] == '/' else '*'}."
            )
            yield f"{aside[0]}{_more(aside)}: named as a test or validation split, and trained on. {advice}"


def refuse(source: str, findings: Sequence[FileFinding], error: type[DataError] = DataError) -> None:
    """Raise an error with all findings: one as a sentence, more as a table of up to three problems.

    Args:
        source: the source as the recipe names it.
        findings: the findings; nothing happens if there are none.
        error: type of the error.
    """
    if not findings:
        return
    by_problem: dict[str, list[str]] = {}
    for path, problem in findings:
        by_problem.setdefault(problem, []).append(path)
    rows = [f"{paths[0]}{_more(paths)}: {problem}" for problem, paths in by_problem.items()]
    if len(rows) == 1:
        raise error(rows[0])
    if rest := list(by_problem.values())[_ROWS:]:
        rows[_ROWS:] = [f"and {plural(sum(map(len, rest)), 'file')} with {plural(len(rest), 'other problem')}"]
    raise error("\n  ".join([f"{source}: {len(findings)} of its files cannot be used:", *rows]))


def _more(paths: Sequence[str]) -> str:
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""
