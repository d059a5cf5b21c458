"""A path, folder, glob or URL -> a sorted list of files with fingerprints -> the documents of a corpus, in order.

The order of the files is the order of their paths, so it is the same on every machine; the fingerprint of a file is
its size and the sha256 of its content. Where it lies, here or in a remote store, is no part of it.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hlat.config import DataConfig, is_url
from hlat.data.ahead import in_turn
from hlat.data.cache import Cache
from hlat.data.fetching import Shelf
from hlat.data.readers import TEXT, kind_of
from hlat.data.remote import Missing, RemoteFile, Store, local_path, name_of
from hlat.data.retries import Away
from hlat.runtime import DataError

CACHE = "cache"
"""Subfolder of the prepared data where files of URLs are kept unless data.cache_dir names another folder."""


class NothingThere(DataError):
    """Where the recipe looks for text there is nothing."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus.

    Attributes:
        path: where it is, a path or a URL, as it is shown and recorded; ``opened`` says where it can be read.
        column: column or key of its text.
        source: index of the source it belongs to; -1 for data.validation.path.
        size, mtime_ns, etag: as the file system or the store says; together a cheap sign that it is still the same.
        sha256: of its content.
        shelf: where a file of a URL comes from and is kept; None for one that is here.
    """

    path: str
    column: str
    source: int
    size: int
    mtime_ns: int
    sha256: str = ""
    etag: str = ""
    shelf: Shelf | None = field(default=None, compare=False, repr=False)

    @property
    def is_validation(self) -> bool:
        """Whether the whole file is validation text."""
        return self.source < 0

    @property
    def content(self) -> list[str | int]:
        """What of it decides the prepared tokens."""
        return [self.source, self.column, _kind(self.path), self.size, self.sha256]

    @property
    def stamp(self) -> "Stamp":
        """What the file is known by without reading it."""
        return self.path, self.size, self.mtime_ns, self.etag

    @property
    def room(self) -> int | None:
        """Bytes of the cache that the file is fetched into; None for one that is here."""
        return None if self.shelf is None else self.shelf.cache.limit

    @property
    def remembered_sha256(self) -> str | None:
        """The sha256 that the cache remembers of a file that was fetched before."""
        return None if self.shelf is None else self.shelf.cache.known_sha256(self._remote)

    @contextmanager
    def opened(self, wanted: Callable[[], bool] = lambda: True) -> Iterator[Path]:
        """Where the file can be read for as long as the context lasts: a remote one is fetched, whole, and kept.

        Args:
            wanted: fetching ends early once this is no longer so.

        Raises:
            DataError: a remote file that cannot be had, or that is no longer the one that was fingerprinted.
            StorageError: the disk of the cache refused.
        """
        if self.shelf is None:
            yield Path(self.path)
            return
        with self.shelf.hold(self._remote, wanted) as local:
            if self.sha256 and (self.remembered_sha256 or _sha256(local)) != self.sha256:
                raise DataError(f"{self.path}: {_CHANGED}")
            yield local

    @contextmanager
    def named(self, local: Path) -> Iterator[None]:
        """Errors about the local copy become errors about the file."""
        try:
            yield
        except DataError as error:
            if self.shelf is None:
                raise
            raise DataError(str(error).replace(str(local), self.path)) from error

    def check_unchanged(self) -> None:
        """Raise DataError if the file is no longer the one that was fingerprinted; a fetched one always is."""
        if self.shelf is None and _stat(Path(self.path)) != (self.size, self.mtime_ns):
            raise DataError(f"{self.path}: {_CHANGED}")

    @property
    def _remote(self) -> RemoteFile:
        return RemoteFile(self.path, self.size, self.etag, self.mtime_ns)


Stamp = tuple[str, int, int, str]
"""(path, size, mtime_ns, etag) of a file."""

_CHANGED = "the file changed while it was being read. Run again once it is complete."


def list_files(config: DataConfig, folder: Path) -> list[SourceFile]:
    """The files of a data section, in the order in which their documents follow one another, not yet hashed.

    Args:
        config: the data section.
        folder: of the prepared data; files of URLs are kept in it where ``data.cache_dir`` names no other folder.

    Raises:
        NothingThere: nothing at a path.
        DataError: no source, a file that is known not to be text, text and record files mixed in one folder, or a
            URL that cannot be used.
    """
    cache = Cache(*cache_of(config, folder))
    sources = [(source.path, source.text_column or config.text_column) for source in config.sources]
    if config.path is not None:
        sources.insert(0, (config.path, config.text_column))
    if not sources:
        raise DataError(
            "data: no corpus. Set data.path to a file, folder or glob, for example data.path=corpus/**/*.txt"
        )
    named = [(index, path, column) for index, (path, column) in enumerate(sources)]
    if config.validation.path is not None:
        named.append((-1, config.validation.path, config.text_column))
    files = [file for index, path, column in named for file in _files_of(path, column, index, cache)]
    for file in files:
        _kind(file.path)  # refuses endings that are no text, before terabytes are hashed
    return files


def cache_of(config: DataConfig, folder: Path) -> tuple[Path, int]:
    """Where files of URLs are kept, and bytes that they may take."""
    return Path(config.cache_dir or folder / CACHE).expanduser(), int(config.cache_gib * 2**30)


def shelf_of(path: str, cache: Cache) -> Shelf | None:
    """Where a file of a URL comes from and is kept; None for a path."""
    return Shelf(Store(path), cache) if is_url(path) else None


def _files_of(path: str, column: str, source: int, cache: Cache) -> list[SourceFile]:
    path = local_path(path)
    if not is_url(path):
        return [SourceFile(str(file), column, source, *_stat(file)) for file in find_files(path)]
    shelf = Shelf(Store(path), cache)
    return [
        SourceFile(file.url, column, source, file.size, file.mtime_ns, etag=file.etag, shelf=shelf)
        for file in _find_remote(path, shelf.store)
    ]


def _find_remote(url: str, store: Store) -> list[RemoteFile]:
    try:
        files = store.find()
    except (Missing, Away) as error:
        raise NothingThere(str(error)) from error
    if not files:
        raise NothingThere(f"{url}: no file matches this glob. Quote it in the shell, and use ** to cross folders.")
    if url.rstrip("/") != files[0].url and not glob.has_magic(url):
        _check_one_kind(url, [file.url for file in files])
    return files


def find_files(path: str) -> list[Path]:
    """The files of one source, sorted by path.

    Args:
        path: a file, a folder (all files below it, hidden ones left out), or a glob, where ** crosses folders.

    Raises:
        NothingThere: nothing there.
        DataError: an empty folder, or one that mixes text files with parquet, arrow or jsonl files.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        files = sorted(file for file in _below(root) if file.is_file() and not _hidden(file.relative_to(root)))
        if not files:
            raise DataError(f"{path}: the folder holds no files")
        _check_one_kind(path, [str(file) for file in files])
        return files
    if glob.has_magic(path):
        files = sorted(Path(name) for name in _matches(str(root)) if Path(name).is_file())
        if not files:
            raise NothingThere(
                f"{path}: no file matches this glob. Quote it in the shell, and use ** to cross folders."
            )
        return files
    raise NothingThere(f"{path}: no such file or folder (looked in {Path.cwd()})")


def fingerprint(
    files: list[SourceFile], known: dict[Stamp, str], progress: Callable[[int, int], None]
) -> list[SourceFile]:
    """The files with their sha256; those of URLs are fetched for it, unless they were fetched before.

    Args:
        files: from list_files.
        known: sha256 of files hashed before, which are not read again.
        progress: called with bytes done and bytes in all.
    """
    total = sum(file.size for file in files)
    done = 0
    hashes = [known.get(file.stamp) or file.remembered_sha256 for file in files]
    hashed = []
    unknown = [file for file, sha256 in zip(files, hashes, strict=True) if sha256 is None]
    with closing(in_turn(unknown)) as arriving:
        for file, sha256 in zip(files, hashes, strict=True):
            hashed.append(replace(file, sha256=sha256 or _hash_next(arriving)))
            done += file.size
            progress(done, total)
    return hashed


def _hash_next(arriving: Iterator[tuple[SourceFile, Path]]) -> str:
    file, local = next(arriving)
    return file.remembered_sha256 or _sha256(local)


def corpus_changes(before: list[tuple[str, list[str | int]]], now: list[SourceFile]) -> list[str]:
    """One sentence on how a corpus differs from what it was, by content and order; nothing for one that was moved.

    Args:
        before: path and ``SourceFile.content`` of each file, in order.
        now: the files, fingerprinted.
    """
    if [content for _, content in before] == [file.content for file in now]:
        return []
    old, new = dict(before), {file.path: file.content for file in now}
    size_and_hash = slice(3, None)
    found = {
        "changed since": [path for path in new if path in old and new[path][size_and_hash] != old[path][size_and_hash]],
        "new": [path for path in new if path not in old],
        "gone": [path for path in old if path not in new],
    }
    parts = [f"{paths[0]}{_more(len(paths) - 1)} {what}" for what, paths in found.items() if paths]
    counts = f"from {len(before)} files, now {len(now)}: " if len(before) != len(now) else ""
    return [f"the corpus: {counts}{', '.join(parts) or 'the same files in another order, source or text column'}"]


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return stat.st_size, stat.st_mtime_ns


def _matches(pattern: str) -> list[str]:
    return glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns


def _below(root: Path) -> Iterator[Path]:
    """Everything below a folder; a folder that may not be listed is an error, since what is in it would be missing."""
    for folder, _, names in os.walk(root, onerror=_cannot_list):
        yield from (Path(folder, name) for name in names)


def _cannot_list(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder cannot be listed: {error.strerror}") from error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: str) -> str:
    """How a file is read; refused with its whole URL, if it has one, since several may have the same name."""
    if not is_url(path):
        return kind_of(Path(path))
    name = Path(name_of(path))
    try:
        return kind_of(name)
    except DataError as error:
        raise DataError(str(error).replace(str(name), path, 1)) from error


def _check_one_kind(path: str, files: list[str]) -> None:
    texts = [file for file in files if _kind(file) == TEXT]
    if texts and len(texts) < len(files):
        record = next(file for file in files if _kind(file) != TEXT)
        text, other = (Path(name_of(file)) for file in (texts[0], record))
        raise DataError(
            f"{path}: the folder mixes text files ({text}) with {_kind(record)} files ({other}), so "
            f"which are the corpus is not clear. Name them with a glob such as {path.rstrip('/')}/**/*{other.suffix}"
        )
