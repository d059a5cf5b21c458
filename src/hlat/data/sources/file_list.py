"""List and hash the files of a corpus.

    path, folder, glob or URL --list--> sorted files --hash--> files with fingerprints

Files are sorted by path, so their order is the same on every machine. The fingerprint of a file is its size and the
sha256 of its content. It does not depend on the location of the file, local or remote.
"""

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from hlat.config.sections import DataConfig
from hlat.data.sources.megatron_pairs import TWO_FILES, pair_indexes
from hlat.data.sources.source_checks import check_folder, check_source, check_tokenizer_given
from hlat.data.sources.source_file import SourceFile, Stamp, sha256_of, stat_of
from hlat.data.stores import (
    Cache,
    CachedStore,
    RemoteFile,
    Store,
    StoreAccessError,
    StoreUnavailableError,
    local_path,
    prefetch_in_order,
)
from hlat.runtime import DataError, is_url

CACHE_FOLDER = "cache"
"""Subfolder of the prepared data with the cache of remote files, unless data.cache_dir names another folder."""


class SourceNotFoundError(DataError):
    """A source of the recipe has no files."""


def list_files(config: DataConfig, folder: Path) -> list[SourceFile]:
    """List the files of a data section in the order of their documents; they are not hashed yet.

    Args:
        config: the data section.
        folder: folder of the prepared data; it contains the cache of remote files unless ``data.cache_dir`` is set.

    Raises:
        SourceNotFoundError: a path or glob has no files.
        DataError: there is no source, a file of a type that hlat does not read, files that cannot be one source, a
            .bin or .idx without the other, tokens without a tokenizer, or a URL that cannot be used.
    """
    cache = Cache(*cache_location(config, folder))
    sources = [(source.path, source.text_column or config.text_column) for source in config.sources]
    if config.path is not None:
        sources.insert(0, (config.path, config.text_column))
    if not sources:
        raise DataError(
            "data: no corpus. Set data.path to a file, folder or glob, for example data.path=corpus/**/*.txt"
        )
    numbered = [(index, path, column) for index, (path, column) in enumerate(sources)]
    if config.validation.path is not None:
        numbered.append((-1, config.validation.path, config.text_column))
    files = [file for index, path, column in numbered for file in _files_of(path, column, index, cache)]
    for file in files:
        if file.index is not None:
            check_tokenizer_given(file.path, config.tokenizer.path)
    return files


def cache_location(config: DataConfig, folder: Path) -> tuple[Path, int]:
    """Return the folder of the cache of remote files, and its maximum size in bytes."""
    return Path(config.cache_dir or folder / CACHE_FOLDER).expanduser(), int(config.cache_gib * 2**30)


def open_cached_store(path: str, cache: Cache) -> CachedStore | None:
    """Open the store of a URL together with the cache; return None for a local path."""
    return CachedStore(Store(path), cache) if is_url(path) else None


def _files_of(path: str, column: str, source: int, cache: Cache) -> list[SourceFile]:
    path = local_path(path)
    if is_url(path):
        cached_store = CachedStore(Store(path), cache)
        found = [_remote(file, column, source, cached_store) for file in _find_remote(path, cached_store.store)]
    else:
        found = [SourceFile(str(file), column, source, *stat_of(file)) for file in find_files(path)]
    check_source(path, [file.path for file in found])  # before hashing, which may take hours
    return pair_indexes(found, partial(_find_index, column=column, source=source, cache=cache))


def _find_index(path: str, column: str, source: int, cache: Cache) -> SourceFile | None:
    """Find the .idx of a .bin if the recipe's path does not include it; return None if it does not exist."""
    if not is_url(path):
        return SourceFile(path, column, source, *stat_of(Path(path))) if Path(path).is_file() else None
    store = Store(path)
    try:
        return _remote(store.find()[0], column, source, CachedStore(store, cache))
    except StoreAccessError as error:
        raise DataError(f"{error} {TWO_FILES}.") from error


def _remote(file: RemoteFile, column: str, source: int, cached_store: CachedStore) -> SourceFile:
    return SourceFile(file.url, column, source, file.size, file.mtime_ns, etag=file.etag, cached_store=cached_store)


def _find_remote(url: str, store: Store) -> list[RemoteFile]:
    try:
        files = store.find()
    except (StoreAccessError, StoreUnavailableError) as error:
        raise SourceNotFoundError(str(error)) from error
    if not files:
        raise SourceNotFoundError(
            f"{url}: no file matches this glob. Quote it in the shell, and use ** to cross folders."
        )
    if url.rstrip("/") != files[0].url and not glob.has_magic(url):
        check_folder(url, [file.url for file in files])
    return files


def find_files(path: str) -> list[Path]:
    """List the local files of one source, sorted by path.

    Args:
        path: a file, a folder (all files below it except hidden ones), or a glob, in which ** crosses folders.

    Raises:
        SourceNotFoundError: no such file, or no match.
        DataError: an empty folder, or one that mixes text files with parquet, arrow or jsonl files.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        files = sorted(file for file in _walk(root) if file.is_file() and not _hidden(file.relative_to(root)))
        if not files:
            raise DataError(f"{path}: the folder contains no files")
        check_folder(path, [str(file) for file in files])
        return files
    if glob.has_magic(path):
        files = sorted(Path(name) for name in _matches(str(root)) if Path(name).is_file())
        if not files:
            raise SourceNotFoundError(
                f"{path}: no file matches this glob. Quote it in the shell, and use ** to cross folders."
            )
        return files
    raise SourceNotFoundError(f"{path}: no such file or folder (looked in {Path.cwd()})")


def hash_files(
    files: list[SourceFile], known: dict[Stamp, str], progress: Callable[[int, int], None]
) -> list[SourceFile]:
    """Compute the sha256 of each file; remote files are fetched for this unless they were fetched before.

    Args:
        files: result of ``list_files``.
        known: sha256 of files that were hashed before; these are not read again.
        progress: called with the bytes done and the total bytes.

    Returns:
        The files with their sha256.

    Raises:
        DataError: a file cannot be read.
    """
    hashes = _iter_hashes([file for source_file in files for file in source_file.files], known, progress)
    hashed = []
    for file in files:
        own = replace(file, sha256=next(hashes))
        hashed.append(own if own.index is None else replace(own, index=replace(own.index, sha256=next(hashes))))
    return hashed


def _iter_hashes(
    files: list[SourceFile], known: dict[Stamp, str], progress: Callable[[int, int], None]
) -> Iterator[str]:
    total = sum(file.size for file in files)
    done = 0
    hashes = [known.get(file.stamp) or file.cached_sha256 for file in files]
    unknown = [file for file, sha256 in zip(files, hashes, strict=True) if sha256 is None]
    with closing(prefetch_in_order(unknown)) as opened:
        for file, sha256 in zip(files, hashes, strict=True):
            found = sha256 or _hash_next(opened)
            done += file.size
            progress(done, total)
            yield found


def _hash_next(opened: Iterator[tuple[SourceFile, Path]]) -> str:
    file, local = next(opened)
    return file.cached_sha256 or sha256_of(local)


def describe_corpus_changes(before: list[tuple[str, list[str | int]]], now: list[SourceFile]) -> list[str]:
    """Describe in one sentence how a corpus has changed in content or order; empty if it was only moved.

    Args:
        before: path and ``SourceFile.content`` of each earlier file, in order.
        now: the current files, hashed.
    """
    if [content for _, content in before] == [file.content for file in now]:
        return []
    old, new = dict(before), {file.path: file.content for file in now}
    size_and_hash = slice(3, None)
    changes = {
        "changed since": [path for path in new if path in old and new[path][size_and_hash] != old[path][size_and_hash]],
        "new": [path for path in new if path not in old],
        "gone": [path for path in old if path not in new],
    }
    phrases = [f"{paths[0]}{_more(len(paths) - 1)} {change}" for change, paths in changes.items() if paths]
    counts = f"from {len(before)} files, now {len(now)}: " if len(before) != len(now) else ""
    return [f"the corpus: {counts}{', '.join(phrases) or 'the same files in another order, source or text column'}"]


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


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
