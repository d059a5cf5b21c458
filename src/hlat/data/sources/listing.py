"""List the files of one source: a file, a folder, a glob or a URL.

    path, folder, glob or URL --> files, sorted by path, their names in the folder if the source is one, and findings

Files are sorted by path, so their order is the same on every machine. Links to folders are followed, each folder once.
"""

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hlat.data.sources.findings import FileFinding
from hlat.data.sources.source_file import stat_of
from hlat.data.stores.cache import Cache
from hlat.data.stores.fetching import CachedStore
from hlat.data.stores.remote import RemoteFile, Store, StoreAccessError, local_path
from hlat.data.stores.retries import StoreUnavailableError
from hlat.runtime.errors import DataError
from hlat.runtime.hub_ids import dataset_id_advice
from hlat.runtime.storage.file_content import broken_link
from hlat.runtime.urls import is_url

_SMALL_BYTES = 1 << 24
_EFFECTIVE = os.access in os.supports_effective_ids
_OF_SYSTEM = ("lost+found", "System Volume Information", "$RECYCLE.BIN")
_NO_DISKS = ("proc", "sys")  # files that the kernel makes up: to read one may wait for ever
_FILE_ENDING = re.compile(r"\.[A-Za-z]\w{0,9}")
_FETCH = "Fetch what it stands for (git annex get, dvc pull; mount its disk), or remove the link."


class SourceNotFoundError(DataError):
    """A source of the recipe has no files, or files that cannot be listed or are of no format."""


class ListedFile(NamedTuple):
    """A file of a source, local or remote.

    Attributes:
        path: its path or URL.
        size: in bytes.
        mtime_ns: time of last modification in ns; 0 if unknown.
        etag: version identifier of a remote store; empty if there is none.
        cached_store: store and cache of a remote file; None for a local file.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str = ""
    cached_store: CachedStore | None = None

    @contextmanager
    def open_local(self) -> Iterator[Path]:
        """Yield a local path of the file, valid until the context ends; a remote file is fetched completely.

        Raises:
            DataError: a remote file cannot be fetched.
            StorageError: the disk of the cache refused the write.
        """
        if self.cached_store is None:
            yield Path(self.path)
            return
        remote = RemoteFile(self.path, self.size, self.etag, self.mtime_ns)
        with self.cached_store.acquire(remote, lambda: True) as local:
            yield local

    @classmethod
    def local(cls, path: Path) -> "ListedFile":
        """Return a local file; raise DataError if stat fails."""
        return cls(str(path), *stat_of(path))

    @classmethod
    def remote(cls, file: RemoteFile, cached_store: CachedStore) -> "ListedFile":
        """Return a file of a store."""
        return cls(file.url, file.size, file.mtime_ns, file.etag, cached_store)


class Listing(NamedTuple):
    """The files of a source.

    Attributes:
        files: the files.
        names: their paths relative to the folder that the source is, with "/"; None if it is a file or a glob.
        findings: what belongs to the source and cannot be listed, such as links to nowhere.
    """

    files: list[ListedFile]
    names: list[str] | None
    findings: Sequence[FileFinding] = ()

    def read(self, name: str) -> bytes:
        """Return the content of a small file of the folder.

        Raises:
            DataError: it cannot be read, or is not small.
        """
        assert self.names is not None, "only folders have names"
        file = self.files[self.names.index(name)]
        if file.size > _SMALL_BYTES:
            raise DataError(f"{name} has {file.size:,} bytes, which is too many for a description of a data set")
        try:
            with file.open_local() as local:
                return local.read_bytes()
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror}") from error


def list_source(path: str, cache: Cache) -> Listing:
    """List the files of a source.

    Args:
        path: path, folder, glob or URL.
        cache: cache of remote files.

    Raises:
        SourceNotFoundError: a path or glob has no files.
        DataError: an empty folder, or a URL that cannot be used.
    """
    path = local_path(path)
    if is_url(path):
        cached_store = CachedStore(Store(path), cache)
        found = _find_remote(path, cached_store.store)
        is_folder = path.rstrip("/") != found[0].url and not glob.has_magic(path)
        names = [file.url.removeprefix(f"{path.rstrip('/')}/") for file in found]
        return Listing([ListedFile.remote(file, cached_store) for file in found], names if is_folder else None)
    root, (local, findings) = Path(path), find_files(path)
    files = [ListedFile.local(file) for file in local]
    is_folder = root.is_dir()
    return Listing(files, [file.relative_to(root).as_posix() for file in local] if is_folder else None, findings)


def find_file(path: str, cache: Cache) -> ListedFile | None:
    """Find a single file; return None if a local one does not exist.

    Raises:
        StoreAccessError: a remote file does not exist or cannot be accessed.
        DataError: a URL that cannot be used.
    """
    if not is_url(path):
        return ListedFile.local(Path(path)) if Path(path).is_file() else None
    store = Store(path)
    return ListedFile.remote(store.find()[0], CachedStore(store, cache))


def _find_remote(url: str, store: Store) -> list[RemoteFile]:
    try:
        files = store.find()
    except (StoreAccessError, StoreUnavailableError) as error:
        raise SourceNotFoundError(str(error)) from error
    if not files:
        raise SourceNotFoundError(
            f"{url}: no file matches this glob. Quote it in the shell, and use ** to cross folders."
        )
    return files


def find_files(path: str) -> tuple[list[Path], list[FileFinding]]:
    """List the local files of one source, sorted by path, and what belongs to it and cannot be read.

    Args:
        path: a file, a folder (all files below it except hidden ones), or a glob, in which ** crosses folders.

    Raises:
        SourceNotFoundError: no such file, or no match.
        DataError: an empty folder, or one that may not be entered.
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
        findings = list[FileFinding]()
        files, unusable = _sorted(_walk(root, ("**",), findings))
        if not (files or findings or unusable):
            raise DataError(f"{path}: the folder contains no files. Put the texts there, or name another folder.")
        return files, [*findings, *unusable]
    if glob.has_magic(path):
        findings = list[FileFinding]()
        first = next(index for index, part in enumerate(root.parts) if glob.has_magic(part))
        folder, pattern = Path(*root.parts[:first]), root.parts[first:]
        is_walk = "**" in pattern and ".." not in pattern
        files, unusable = _sorted((_walk if is_walk else _matches)(folder, pattern, findings))
        findings += unusable
        if not (files or findings):
            raise SourceNotFoundError(
                f"{path}: no file matches this glob. Quote it in the shell, and use ** to cross folders."
            )
        return files, findings
    if link := broken_link(root):
        raise SourceNotFoundError(f"{path}: {link}. Correct the link.")
    if "$" in path:
        advice = "Environment variables are not filled in here: let the shell do it, in double quotes."
        raise SourceNotFoundError(f"{path}: no such file or folder. {advice}")
    if root.is_absolute():
        raise SourceNotFoundError(f"{path}: no such file or folder")
    advice = dataset_id_advice(path) or "Relative paths start at the folder of the command."
    raise SourceNotFoundError(f"{path}: no such file or folder (looked in {Path.cwd()}). {advice}")


def _matches(root: Path, pattern: Sequence[str], findings: list[FileFinding]) -> Iterator[Path]:
    """Yield the paths that match a glob without **, and links to nowhere that may be folders that it crosses.

    Folders that it crosses and that cannot be listed are findings.
    """
    for end in range(1, len(pattern)):
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
    """Return True for a link to nowhere whose name is no file's: the pattern has it, or it has no ending of files."""
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
    """Yield the paths below a folder that match a glob with ** and are no folders, and links that may be folders.

    Python's glob follows links to folders without end, and leaves out what it cannot list. Here each folder is entered
    once: links to folders come after everything else, and are not followed to where the walk has been or to what is
    around the root.
    """

    def cannot_list(error: OSError) -> None:
        if error.filename == str(root) or not _is_of_system(Path(error.filename).name):
            findings.append(FileFinding(str(error.filename), f"the folder cannot be listed: {error.strerror}."))

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
        starts = [link for link in sorted(links) if os.path.realpath(link) not in seen]


def _places(pattern: Sequence[str], names: Iterable[str], places: Iterable[int] = (0,)) -> set[int]:
    """Return the places in a pattern that these names of a path lead to from some places; its end is a match.

    The rules are those of Python's glob: ** and wildcards do not match hidden names, unless the part begins with a dot.
    """
    found = _after_stars(pattern, places)
    for name in names:
        steps = ((place, pattern[place]) for place in found if place < len(pattern))
        found = _after_stars(
            pattern,
            [place + (part != "**") for place, part in steps if _matches_part(name, part)],
        )
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
    return (part.startswith(".") or not name.startswith(".")) and fnmatch.fnmatchcase(name, part)
