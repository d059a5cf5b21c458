"""One file of the corpus: its identity, and access to its content, local or in a remote store.

SourceFile --open--> InputFile, local or in the cache --format--> rows
files --threads, a few ahead--> locked in the cache --in order--> the caller, who releases each before the next
(prefetch_in_order)
files --a few, evenly spread--> first rows, or first bytes of a file that is one document --> texts
(read_beginnings)

The number of prefetched files and their share of the cache are bounded, so that prefetching never takes the space of
the file that is being read.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hlat.data.documents import Vocabulary
from hlat.data.formats.base import FileFormat
from hlat.data.formats.rows import InputFile, convert_file_errors
from hlat.data.formats.streams import open_decompressed
from hlat.data.stores.fetching import CachedStore
from hlat.data.stores.local_files import as_data_error, file_stamp
from hlat.data.stores.remote import StoredFile
from hlat.runtime.errors import DataError


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus, local or remote."""

    path: str  # path or URL for messages and records; read the content through ``open_local``
    format: FileFormat
    column: str  # column or key of its documents
    source: int  # index of its source; -1 for data.validation.path
    size: int  # in bytes
    mtime_ns: int  # time of last modification in ns; 0 if unknown
    sha256: str = ""  # hash of its content; empty before ``hash_files``
    # Version identifier of a remote store; empty if there is none. A file whose path, size, mtime_ns and etag are the
    # same is taken as unchanged.
    etag: str = ""
    index: "SourceFile | None" = None  # its companion, such as the .idx of a .bin; None for formats of one file
    # Store and cache of a remote file; None for a local file.
    cached_store: CachedStore | None = field(default=None, compare=False, repr=False)

    @property
    def is_validation(self) -> bool:
        """True if the complete file is validation text."""
        return self.source < 0

    @property
    def content(self) -> list[str | int]:
        """Everything about the file that decides the prepared tokens; the path does not."""
        own: list[str | int] = [self.source, self.column, self.format.name, self.size, self.sha256]
        return own if self.index is None else [*own, self.index.size, self.index.sha256]

    @property
    def files(self) -> "list[SourceFile]":
        """The file, and its companion if it has one."""
        return [self] if self.index is None else [self, self.index]

    @property
    def stamp(self) -> "Stamp":
        """Identity of the file, known without reading it."""
        return self.path, self.size, self.mtime_ns, self.etag

    @property
    def cached_sha256(self) -> str | None:
        """The sha256 of a remote file that was fetched once; None if unknown."""
        return None if self.cached_store is None else self.cached_store.cache.known_sha256(self._remote)

    @contextmanager
    def open_local(self, still_needed: Callable[[], bool] = lambda: True) -> Iterator[Path]:
        """Yield a local path, valid until the context ends; a remote file is fetched completely.

        A fetch is cancelled once ``still_needed`` returns False. DataError if the file cannot be fetched or has changed
        since it was hashed, StorageError of the cache's disk.
        """
        if self.cached_store is None:
            yield Path(self.path)
            return
        with self.cached_store.acquire(self._remote, still_needed) as local:
            if self.sha256 and (self.cached_sha256 or sha256_of(local)) != self.sha256:
                raise DataError(f"{self.path}: {_CHANGED}")
            yield local

    @contextmanager
    def as_input(self, local: Path, vocabulary: Vocabulary | None) -> Iterator[InputFile]:
        """Yield the file with its companion, for its format; errors name the files as the recipe does."""
        stays = self.cached_store is None  # a cache must be able to delete its files
        with self.relabel_errors(local):
            if self.index is None:
                yield InputFile(local, self.column, vocabulary, None, stays)
                return
            with self.index.open_local() as companion, self.index.relabel_errors(companion):
                yield InputFile(local, self.column, vocabulary, companion, stays)

    @contextmanager
    def relabel_errors(self, local: Path) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            if self.cached_store is None:
                raise
            # Not the name in the cache, which says nothing to the user.
            raise DataError(str(error).replace(str(local), self.path)) from error

    def check_unchanged(self) -> None:
        """Raise DataError if a local file has changed since it was hashed."""
        for file in self.files:
            # A fetched file was checked by its hash.
            if file.cached_store is None and file_stamp(Path(file.path))[:2] != (file.size, file.mtime_ns):
                raise DataError(f"{file.path}: {_CHANGED}")

    @property
    def _remote(self) -> StoredFile:
        return StoredFile(self.path, self.size, self.etag, self.mtime_ns)


Stamp = tuple[str, int, int, str]  # (path, size, mtime_ns, etag) of a file

_CHANGED = "the file changed while it was being read. Run again once it is complete."


def sha256_of(path: Path) -> str:
    """Compute the sha256 of a file; DataError if it cannot be read."""
    with as_data_error(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MAX_AHEAD = 8  # files; for a small file the request takes longer than the transfer
_CACHE_DIVISOR = 4  # prefetched files take at most a quarter of the cache
_STOP_SECONDS = 5.0


_LocalFile = tuple[Path, ExitStack]  # closing the stack releases the file


def prefetch_in_order(files: Sequence[SourceFile]) -> Generator[tuple[SourceFile, Path], None, None]:
    """Yield each file with a local path, valid until the next is requested; close the iterator to stop early.

    Files of stores are fetched by threads, a few ahead. What ``open_local`` raised for a file is raised when it is
    reached.
    """
    stopped = threading.Event()
    pending: deque[Future[_LocalFile]] = deque()
    ahead = 0  # bytes of the files opened after the current one
    try:
        for index, file in enumerate(files):
            if not pending:
                pending.append(_open(file, stopped))
            else:
                ahead -= file.size
            while (following := index + len(pending)) < len(files) and len(pending) <= _MAX_AHEAD:
                candidate = files[following]
                if not _may_prefetch(candidate, ahead, file):
                    break
                ahead += candidate.size
                pending.append(_open(candidate, stopped))
            path, release = pending.popleft().result()
            with release:
                yield file, path
    finally:
        stopped.set()
        # Time to remove partial files, but short: else the next start removes them.
        wait(pending, _STOP_SECONDS)
        for future in pending:
            future.add_done_callback(_release)  # whatever was still being fetched is released as soon as it is there


def _may_prefetch(candidate: SourceFile, ahead: int, current: SourceFile) -> bool:
    """Return True if a file is remote and the cache has space for it next to all that are open."""
    if candidate.cached_store is None:
        return False
    ahead, limit = ahead + candidate.size, candidate.cached_store.cache.limit
    return ahead <= limit // _CACHE_DIVISOR and ahead + current.size <= limit


def _release(future: "Future[_LocalFile]") -> None:
    if future.exception() is None:
        future.result()[1].close()


def _open(file: SourceFile, stopped: threading.Event) -> "Future[_LocalFile]":
    """Open a local file at once, or have a thread fetch a remote one; return a future of its path."""
    result: Future[_LocalFile] = Future()

    def open_file() -> None:
        release = ExitStack()
        try:
            path = release.enter_context(file.open_local(lambda: not stopped.is_set()))
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result((path, release))

    if file.cached_store is None:
        open_file()
    else:
        # A daemon: an unreachable store can block it for a minute, which the end of the program must not wait for.
        threading.Thread(target=open_file, daemon=True).start()
    return result


_FILES, _ROWS, _CHARS = 8, 8, 1 << 14


def read_beginnings(files: Sequence[SourceFile]) -> list[str]:
    """Return some texts of local files; nothing of token ids, or of files that cannot be read."""
    local = [file for file in files if file.cached_store is None and not file.format.holds_tokens]
    texts: list[str] = []
    for file in local[:: max(1, -(-len(local) // _FILES))]:
        with suppress(DataError):  # whoever prepares the file reports it
            texts += islice(_first_texts(file), _ROWS)
    return texts


def _first_texts(file: SourceFile) -> Iterator[str]:
    path = Path(file.path)
    if file.format.is_one_document:
        with convert_file_errors(path, file.format.kind), path.open("rb") as raw:
            yield open_decompressed(path, raw).read(_CHARS).decode(errors="ignore")
        return
    with file.as_input(path, None) as opened:
        for row in file.format.documents(opened):
            if isinstance(row.content, str) and row.content:
                yield row.content[:_CHARS]
