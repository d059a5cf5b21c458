"""One file of the corpus: what it is known by, and how to get at it, here or in a remote store."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hlat.data.sources.source_checks import path_file_type
from hlat.data.stores import CachedStore, RemoteFile
from hlat.runtime import DataError


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus.

    Attributes:
        path: where it is, a path or a URL, as it is shown and recorded; ``open_local`` says where it can be read.
        column: column or key of its text.
        source: index of the source it belongs to; -1 for data.validation.path.
        size, mtime_ns, etag: as the file system or the store says; together a cheap sign that it is still the same.
        sha256: of its content.
        index: the .idx of a file of tokens; None for text.
        cached_store: where a file of a URL comes from and is kept; None for one that is here.
    """

    path: str
    column: str
    source: int
    size: int
    mtime_ns: int
    sha256: str = ""
    etag: str = ""
    index: "SourceFile | None" = None
    cached_store: CachedStore | None = field(default=None, compare=False, repr=False)

    @property
    def is_validation(self) -> bool:
        """Whether the whole file is validation text."""
        return self.source < 0

    @property
    def content(self) -> list[str | int]:
        """What of it decides the prepared tokens."""
        own: list[str | int] = [self.source, self.column, path_file_type(self.path), self.size, self.sha256]
        return own if self.index is None else [*own, self.index.size, self.index.sha256]

    @property
    def files(self) -> "list[SourceFile]":
        """The file, and its .idx if it has one."""
        return [self] if self.index is None else [self, self.index]

    @property
    def stamp(self) -> "Stamp":
        """What the file is known by without reading it."""
        return self.path, self.size, self.mtime_ns, self.etag

    @property
    def cache_limit(self) -> int | None:
        """Bytes of the cache that the file is fetched into; None for one that is here."""
        return None if self.cached_store is None else self.cached_store.cache.limit

    @property
    def cached_sha256(self) -> str | None:
        """The sha256 that the cache remembers of a file that was fetched before."""
        return None if self.cached_store is None else self.cached_store.cache.known_sha256(self._remote)

    @contextmanager
    def open_local(self, wanted: Callable[[], bool] = lambda: True) -> Iterator[Path]:
        """Where the file can be read for as long as the context lasts: a remote one is fetched, whole, and kept.

        Args:
            wanted: fetching ends early once this is no longer so.

        Raises:
            DataError: a remote file that cannot be had, or that is no longer the one that was fingerprinted.
            StorageError: the disk of the cache refused.
        """
        if self.cached_store is None:
            yield Path(self.path)
            return
        with self.cached_store.acquire(self._remote, wanted) as local:
            if self.sha256 and (self.cached_sha256 or sha256_of(local)) != self.sha256:
                raise DataError(f"{self.path}: {_CHANGED}")
            yield local

    @contextmanager
    def relabel_errors(self, local: Path) -> Iterator[None]:
        """Errors about the local copy become errors about the file."""
        try:
            yield
        except DataError as error:
            if self.cached_store is None:
                raise
            raise DataError(str(error).replace(str(local), self.path)) from error

    def check_unchanged(self) -> None:
        """Raise DataError if the file is no longer the one that was fingerprinted; a fetched one always is."""
        for part in self.files:
            if part.cached_store is None and stat_of(Path(part.path)) != (part.size, part.mtime_ns):
                raise DataError(f"{part.path}: {_CHANGED}")

    @property
    def _remote(self) -> RemoteFile:
        return RemoteFile(self.path, self.size, self.etag, self.mtime_ns)


Stamp = tuple[str, int, int, str]
"""(path, size, mtime_ns, etag) of a file."""

_CHANGED = "the file changed while it was being read. Run again once it is complete."


def sha256_of(path: Path) -> str:
    """The sha256 of a file; raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def stat_of(path: Path) -> tuple[int, int]:
    """Size and time of modification in ns of a file; raises DataError if it cannot be looked at."""
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return stat.st_size, stat.st_mtime_ns
