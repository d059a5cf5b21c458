"""List the files of one source, and find what keeps them from being the corpus that a recipe means.

    path, folder, glob or URL --list_source--> files, sorted by path, their names in the folder if the source is one
    links, names, endings     --listing------> findings
    first bytes               --format-------> findings --> one error, with a short table

Files are sorted by path, so their order is the same on every machine. Links to folders are followed, each folder once.

Each format says itself what is wrong with a file (``FileFormat.bad_beginning``); nothing here knows formats.
"""

import fnmatch
import glob
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hlat.data.formats.streams import COMPRESSED_ENDINGS
from hlat.data.source_file import SourceFile
from hlat.data.stores.cache import Cache
from hlat.data.stores.fetching import CachedStore
from hlat.data.stores.local_files import file_stamp
from hlat.data.stores.remote import Store, StoreAccessError, StoredFile, StoreUnavailableError, local_path
from hlat.runtime.errors import DataError
from hlat.runtime.storage.hub import dataset_id_advice
from hlat.runtime.storage.local_files import broken_link
from hlat.runtime.terminal import plural
from hlat.runtime.urls import is_url

_TABLE_ROWS = 3
# At once, so that a corpus of millions of files is no list of millions of futures.
_OPENED_TOGETHER, _SUBMITTED = 16, 1 << 10
_SHARD = re.compile(r"[-._](\d{4,6})-of-(\d{4,6})(?:-[0-9a-f]{8,}(?=\.))?")

_TRAIN = re.compile(r"(?i)(?<![a-z])train(?![a-z])")
_ASIDE = re.compile(r"(?i)(?<![a-z])(test|valid|validation|val|dev|eval)(?![a-z])")


class FileFinding(NamedTuple):
    """A problem of a file, and what would help."""

    path: str  # path or URL of the file
    problem: str  # sentences that say what is wrong and what would work; equal ones are told once

    @classmethod
    def of_error(cls, path: str, error: DataError) -> "FileFinding":
        """Return the finding that an error about a file reports."""
        return cls(path, str(error).removeprefix(f"{path}: "))


def first_bytes(files: Iterable[SourceFile], unreadable_rows: float) -> Iterator[FileFinding]:
    """Yield what the first bytes of local files show; files of stores are looked at when they have been fetched."""
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
    # Bad documents are left out later if any are allowed; a file that cannot be read at all is still found above.
    if bad is None or unreadable_rows:
        return None
    return FileFinding(file.path, f"{bad.reason}. {bad.remedy}")


def check_first_bytes(files: Iterable[SourceFile], unreadable_rows: float) -> None:
    """Raise a DataError with everything that the first bytes of a corpus show."""
    refuse("the corpus", list(first_bytes(files, unreadable_rows)))  # before hashing, which may take hours


def doubts(files: Sequence[SourceFile]) -> list[str]:
    """Return sentences about a readable corpus of which parts seem absent, not meant, or there twice."""
    shards, places = defaultdict[tuple[str, str, str], dict[str, str]](dict), Counter[str]()
    local = defaultdict[tuple[int, str], list[SourceFile]](list)
    for file in files:
        places[file.path if is_url(file.path) else os.path.realpath(file.path)] += 1
        # Names such as ``train-00003-of-00040`` say how many files there were.
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
        rows.append(f"{beside[0]}{more(beside)}: the same file uncompressed is beside it, and both are read.")
    if twice := [place for place, times in places.items() if times > 1]:
        rows.append(f"{twice[0]}{more(twice)}: named more than once, and read as often.")
    others = [f"And {len(rows) - _TABLE_ROWS} more like these."] if len(rows) > _TABLE_ROWS else []
    return rows[:_TABLE_ROWS] + others


def _held_out_names(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield a sentence per source of which some files are named train, others test or validation."""
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
            yield f"{aside[0]}{more(aside)}: named as a test or validation split, and trained on. {advice}"


def refuse(source: str, findings: Sequence[FileFinding], error: type[DataError] = DataError) -> None:
    """Raise an error with all findings: one as a sentence, more as a table of up to three problems; none do nothing."""
    if not findings:
        return
    by_problem: dict[str, list[str]] = {}
    for path, problem in findings:
        by_problem.setdefault(problem, []).append(path)
    rows = [f"{paths[0]}{more(paths)}: {problem}" for problem, paths in by_problem.items()]
    if len(rows) == 1:
        raise error(rows[0])
    if rest := list(by_problem.values())[_TABLE_ROWS:]:
        rows[_TABLE_ROWS:] = [f"and {plural(sum(map(len, rest)), 'file')} with {plural(len(rest), 'other problem')}"]
    raise error("\n  ".join([f"{source}: {len(findings)} of its files cannot be used:", *rows]))


def more(paths: Sequence[object]) -> str:
    """Count what a message leaves out after naming the first; empty if there is no other."""
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""


_SMALL_BYTES = 1 << 24  # of a description of a data set, which is read into memory
_EFFECTIVE = os.access in os.supports_effective_ids
_OF_SYSTEM = ("lost+found", "System Volume Information", "$RECYCLE.BIN")
_NO_DISKS = ("proc", "sys")  # files that the kernel makes up: to read one may wait for ever
_FILE_ENDING = re.compile(r"\.[A-Za-z]\w{0,9}")
_FETCH = "Fetch what it stands for (git annex get, dvc pull; mount its disk), or remove the link."
_NO_MATCH = "no file matches this glob. Quote it in the shell, and use ** to cross folders."


class SourceNotFoundError(DataError):
    """A source of the recipe has no files, or files that cannot be listed or are of no format."""


class Listing(NamedTuple):
    """The files of a source, before their formats are known."""

    files: list[StoredFile]
    # Their paths relative to the folder that the source is, with "/"; None if it is a file or a glob.
    names: list[str] | None
    findings: Sequence[FileFinding] = ()  # what belongs to the source and cannot be listed, such as links to nowhere
    cached_store: CachedStore | None = None  # store and cache of remote files; None for local ones

    def read(self, name: str) -> bytes:
        """Return the content of a small file of the folder; DataError if it is unreadable or not small."""
        assert self.names is not None, "only folders have names"
        file = self.files[self.names.index(name)]
        if file.size > _SMALL_BYTES:
            raise DataError(f"{name} has {file.size:,} bytes, which is too many for a description of a data set")
        try:
            if self.cached_store is None:
                return Path(file.path).read_bytes()
            with self.cached_store.acquire(file, lambda: True) as local:
                return local.read_bytes()
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror}") from error


def list_source(path: str, cache: Cache) -> Listing:
    """List the files of a path, folder, glob or URL.

    SourceNotFoundError if a path or glob has no files, DataError for an empty folder or an unusable URL.
    """
    path = local_path(path)
    if is_url(path):
        cached_store = CachedStore(Store(path), cache)
        found = _find_remote(path, cached_store.store)
        # A URL that names a single file is no folder.
        is_folder = path.rstrip("/") != found[0].path and not glob.has_magic(path)
        names = [file.path.removeprefix(f"{path.rstrip('/')}/") for file in found]
        return Listing(found, names if is_folder else None, (), cached_store)
    root, (local, findings) = Path(path), find_files(path)
    relative = [file.relative_to(root).as_posix() for file in local] if root.is_dir() else None
    return Listing([_stored(file) for file in local], relative, findings)


def _stored(file: Path) -> StoredFile:
    size, mtime_ns, *_ = file_stamp(file)
    return StoredFile(str(file), size, "", mtime_ns)


def find_file(path: str, cached_store: CachedStore | None) -> StoredFile | None:
    """Find a single file, None if no such local one; StoreAccessError or DataError for a remote one."""
    if cached_store is not None:
        return cached_store.store.find()[0]
    return _stored(Path(path)) if Path(path).is_file() else None


def _find_remote(url: str, store: Store) -> list[StoredFile]:
    try:
        files = store.find()
    except (StoreAccessError, StoreUnavailableError) as error:
        raise SourceNotFoundError(str(error)) from error
    if not files:
        raise SourceNotFoundError(f"{url}: {_NO_MATCH}")
    return files


def find_files(path: str) -> tuple[list[Path], list[FileFinding]]:
    """List the local files of a path, folder or glob, sorted, and what belongs to them and cannot be read.

    SourceNotFoundError if there is none, DataError for a folder that is empty or may not be entered.
    """
    try:
        return _find_files(path)
    except OSError as error:  # no permission, a name that is too long, links in a circle, a disk that fails
        where = "" if error.filename in (None, path) else f": {error.filename}"
        raise DataError(f"{path}: cannot be accessed: {error.strerror}{where}") from error


def _find_files(path: str) -> tuple[list[Path], list[FileFinding]]:
    root = Path(local_path(path))
    if root.is_file():
        return _sorted([root])
    if root.is_dir():
        found = _below(root, ("**",))
        if not any(found):
            raise DataError(f"{path}: the folder contains no files. Put the texts there, or name another folder.")
        return found
    if glob.has_magic(path):
        first = next(index for index, part in enumerate(root.parts) if glob.has_magic(part))
        found = _below(Path(*root.parts[:first]), root.parts[first:])
        if not any(found):
            raise SourceNotFoundError(f"{path}: {_NO_MATCH}")
        return found
    if link := broken_link(root):
        raise SourceNotFoundError(f"{path}: {link}. Correct the link.")
    if root.exists():
        raise SourceNotFoundError(f"{path}: a pipe, socket or device. Write what it gives to a file, and name that.")
    if "$" in path:
        advice = "Environment variables are not filled in here: let the shell do it, in double quotes."
        raise SourceNotFoundError(f"{path}: no such file or folder. {advice}")
    if root.is_absolute():
        raise SourceNotFoundError(f"{path}: no such file or folder")
    advice = dataset_id_advice(path) or "Relative paths start at the folder of the command."
    raise SourceNotFoundError(f"{path}: no such file or folder (looked in {Path.cwd()}). {advice}")


def _below(root: Path, pattern: Sequence[str]) -> tuple[list[Path], list[FileFinding]]:
    """Return the files below a folder that match a glob, and what belongs to them and cannot be read."""
    findings = list[FileFinding]()
    is_walk = "**" in pattern and ".." not in pattern
    files, unusable = _sorted((_walk if is_walk else _matches)(root, pattern, findings))
    return files, findings + unusable


def _matches(root: Path, pattern: Sequence[str], findings: list[FileFinding]) -> Iterator[Path]:
    """Yield the matches of a glob without **, and links to nowhere that may be folders that it crosses."""
    for end in range(1, len(pattern)):  # glob leaves out folders that it cannot list: they become findings here
        for path in _glob(Path(root, *pattern[:end])):
            if path.is_dir():
                if not (_is_of_system(path.name) or os.access(path, os.R_OK | os.X_OK, effective_ids=_EFFECTIVE)):
                    findings.append(FileFinding(str(path), "the folder cannot be listed: Permission denied."))
            elif _may_be_folder(path, pattern):
                yield path
    yield from _glob(Path(root, *pattern))


def _glob(pattern: Path) -> Iterator[Path]:
    return map(Path, glob.glob(str(pattern), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns


def _may_be_folder(path: Path, pattern: Sequence[str]) -> bool:
    """Return True for a link to nowhere whose name is not that of a file."""
    # A name that the pattern spells out is meant, whatever its ending.
    is_file_name = path.name not in pattern and _FILE_ENDING.fullmatch(path.suffix)
    return not is_file_name and path.is_symlink() and not path.exists()


def _is_of_system(name: str) -> bool:
    """Return True for folders that a file system has for itself, and that only its administrator can list."""
    return name in _OF_SYSTEM or name.startswith((".Trash", ".snapshot"))


def _sorted(paths: Iterable[Path]) -> tuple[list[Path], list[FileFinding]]:
    """Sort paths; return the files, and findings about links to nowhere and names that no record takes."""
    files, findings = list[Path](), list[FileFinding]()
    for path in sorted(set(paths)):
        if not path.is_file():
            if link := broken_link(path):
                findings.append(FileFinding(str(path), f"{link}. {_FETCH}"))
        elif (shown := os.fsencode(path).decode(errors="backslashreplace")) != str(path):
            findings.append(
                FileFinding(shown, "its name is not UTF-8. Rename it: convmv -f LATIN1 -t UTF-8 --notest FILE.")
            )
        else:
            files.append(path)
    return files, findings


def _walk(root: Path, pattern: Sequence[str], findings: list[FileFinding]) -> Iterator[Path]:
    """Yield the paths below a folder that match a glob with ** and are no folders, and links that may be folders."""

    def cannot_list(error: OSError) -> None:
        if error.filename == str(root) or not _is_of_system(Path(error.filename).name):
            findings.append(FileFinding(str(error.filename), f"the folder cannot be listed: {error.strerror}."))

    # Python's glob follows links to folders without end, and leaves out what it cannot list. Here each folder is
    # entered once.
    real = Path(os.path.realpath(root))
    is_top = real == Path(real.anchor)
    if (is_top and pattern[0] == "**") or real.parts[1:2] in [(name,) for name in _NO_DISKS]:
        raise SourceNotFoundError(f"{root}: files of the system are below it. Name the folder of the texts.")
    end, starts = len(pattern), [root]
    seen = {str(parent) for parent in Path(os.path.realpath(root)).parents}
    while starts:
        links = list[Path]()
        for start in starts:
            for folder, inner, names in os.walk(start, onerror=cannot_list):
                places = _places(pattern, Path(folder).relative_to(root).parts)
                inner[:] = [name for name in inner if min(_places(pattern, [name], places), default=end) < end]
                if is_top and Path(folder) == root:
                    inner[:] = [name for name in inner if name not in _NO_DISKS]
                if (here := os.path.realpath(folder)) in seen:
                    inner.clear()
                    continue
                seen.add(here)
                for path in (Path(folder, name) for name in names):
                    after = _places(pattern, [path.name], places)
                    if end in after or (after and _may_be_folder(path, pattern)):
                        yield path
                links += (link for name in inner if (link := Path(folder, name)).is_symlink())
        # Links after everything else, and none to where the walk has been or to what is around the root.
        starts = [link for link in sorted(links) if os.path.realpath(link) not in seen]


def _places(pattern: Sequence[str], names: Iterable[str], places: Iterable[int] = (0,)) -> set[int]:
    """Return the places in a pattern that these names lead to from some places; its end is a match."""
    found = _after_stars(pattern, places)
    for name in names:
        steps = ((place, pattern[place]) for place in found if place < len(pattern))
        found = _after_stars(pattern, [place + (part != "**") for place, part in steps if _matches_part(name, part)])
    return found


def _after_stars(pattern: Sequence[str], places: Iterable[int]) -> set[int]:
    """Add the places after each **, which also matches no folder."""
    found = set(places)
    for place, part in enumerate(pattern):
        if place in found and part == "**":
            found.add(place + 1)
    return found


def _matches_part(name: str, part: str) -> bool:
    if not glob.has_magic(part):
        return name == part
    # As Python's glob: wildcards match hidden names only if the part begins with a dot.
    return (part.startswith(".") or not name.startswith(".")) and fnmatch.fnmatchcase(name, part)
