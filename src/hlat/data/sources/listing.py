"""List the files of one source: a file, a folder, a glob or a URL.

    path, folder, glob or URL --> files, sorted by path, and their names in the folder if the source is one

Files are sorted by path, so their order is the same on every machine.
"""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hlat.data.sources.source_file import stat_of
from hlat.data.stores import (
    Cache,
    CachedStore,
    RemoteFile,
    Store,
    StoreAccessError,
    StoreUnavailableError,
    local_path,
)
from hlat.runtime import DataError, dataset_id_advice, is_url

_SMALL_BYTES = 1 << 24


class SourceNotFoundError(DataError):
    """A source of the recipe has no files."""


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
    """

    files: list[ListedFile]
    names: list[str] | None

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
    root, local = Path(path).expanduser(), find_files(path)
    files = [ListedFile.local(file) for file in local]
    return Listing(files, [file.relative_to(root).as_posix() for file in local] if root.is_dir() else None)


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


def find_files(path: str) -> list[Path]:
    """List the local files of one source, sorted by path.

    Args:
        path: a file, a folder (all files below it except hidden ones), or a glob, in which ** crosses folders.

    Raises:
        SourceNotFoundError: no such file, or no match.
        DataError: an empty folder, or one that may not be entered.
    """
    try:
        return _find_files(path)
    except PermissionError as error:
        raise DataError(f"{path}: cannot be accessed: {error.strerror}: {error.filename}") from error


def _find_files(path: str) -> list[Path]:
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        files = sorted(file for file in _walk(root) if file.is_file() and not _hidden(file.relative_to(root)))
        if not files:
            raise DataError(f"{path}: the folder contains no files. Put the texts there, or name another folder.")
        return files
    if glob.has_magic(path):
        files = sorted(Path(name) for name in _matches(str(root)) if Path(name).is_file())
        if not files:
            raise SourceNotFoundError(
                f"{path}: no file matches this glob. Quote it in the shell, and use ** to cross folders."
            )
        return files
    if root.is_symlink():
        raise SourceNotFoundError(f"{path}: a link to {root.readlink()}, which does not exist. Correct the link.")
    if "$" in path:
        advice = "Environment variables are not filled in here: let the shell do it, in double quotes."
        raise SourceNotFoundError(f"{path}: no such file or folder. {advice}")
    if root.is_absolute():
        raise SourceNotFoundError(f"{path}: no such file or folder")
    advice = dataset_id_advice(path) or "Relative paths start at the folder of the command."
    raise SourceNotFoundError(f"{path}: no such file or folder (looked in {Path.cwd()}). {advice}")


def _matches(pattern: str) -> list[str]:
    return glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns


def _walk(root: Path) -> Iterator[Path]:
    """Yield all files below a folder; a folder that cannot be listed is an error, not empty."""
    for folder, _, names in os.walk(root, onerror=_cannot_list):
        yield from (Path(folder, name) for name in names)


def _cannot_list(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder cannot be listed: {error.strerror}") from error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
