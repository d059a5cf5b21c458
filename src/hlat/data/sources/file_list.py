"""A path, folder, glob or URL -> a sorted list of files with fingerprints -> the documents of a corpus, in order.

The order of the files is the order of their paths, so it is the same on every machine; the fingerprint of a file is
its size and the sha256 of its content. Where it lies, here or in a remote store, is no part of it.
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
"""Subfolder of the prepared data where files of URLs are kept unless data.cache_dir names another folder."""


class SourceNotFoundError(DataError):
    """Where the recipe looks for text there is nothing."""


def list_files(config: DataConfig, folder: Path) -> list[SourceFile]:
    """The files of a data section, in the order in which their documents follow one another, not yet hashed.

    Args:
        config: the data section.
        folder: of the prepared data; files of URLs are kept in it where ``data.cache_dir`` names no other folder.

    Raises:
        NothingThere: nothing at a path.
        DataError: no source, a file that is known not to be text, files that do not go together, a .bin or .idx
            without the other, tokens without a tokenizer, or a URL that cannot be used.
    """
    cache = Cache(*cache_location(config, folder))
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
        if file.index is not None:
            check_tokenizer_given(file.path, config.tokenizer.path)
    return files


def cache_location(config: DataConfig, folder: Path) -> tuple[Path, int]:
    """Where files of URLs are kept, and bytes that they may take."""
    return Path(config.cache_dir or folder / CACHE_FOLDER).expanduser(), int(config.cache_gib * 2**30)


def open_cached_store(path: str, cache: Cache) -> CachedStore | None:
    """Where a file of a URL comes from and is kept; None for a path."""
    return CachedStore(Store(path), cache) if is_url(path) else None


def _files_of(path: str, column: str, source: int, cache: Cache) -> list[SourceFile]:
    path = local_path(path)
    if is_url(path):
        cached_store = CachedStore(Store(path), cache)
        found = [_remote(file, column, source, cached_store) for file in _find_remote(path, cached_store.store)]
    else:
        found = [SourceFile(str(file), column, source, *stat_of(file)) for file in find_files(path)]
    check_source(path, [file.path for file in found])  # before terabytes are hashed
    return pair_indexes(found, partial(_beside, column=column, source=source, cache=cache))


def _beside(path: str, column: str, source: int, cache: Cache) -> SourceFile | None:
    """A file that no path of the recipe names; None if it is not there."""
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
    """The files with their sha256; those of URLs are fetched for it, unless they were fetched before.

    Args:
        files: from list_files.
        known: sha256 of files hashed before, which are not read again.
        progress: called with bytes done and bytes in all.
    """
    hashes = _hashes([part for file in files for part in file.files], known, progress)
    hashed = []
    for file in files:
        own = replace(file, sha256=next(hashes))
        hashed.append(own if own.index is None else replace(own, index=replace(own.index, sha256=next(hashes))))
    return hashed


def _hashes(files: list[SourceFile], known: dict[Stamp, str], progress: Callable[[int, int], None]) -> Iterator[str]:
    total = sum(file.size for file in files)
    done = 0
    hashes = [known.get(file.stamp) or file.cached_sha256 for file in files]
    unknown = [file for file, sha256 in zip(files, hashes, strict=True) if sha256 is None]
    with closing(prefetch_in_order(unknown)) as arriving:
        for file, sha256 in zip(files, hashes, strict=True):
            found = sha256 or _hash_next(arriving)
            done += file.size
            progress(done, total)
            yield found


def _hash_next(arriving: Iterator[tuple[SourceFile, Path]]) -> str:
    file, local = next(arriving)
    return file.cached_sha256 or sha256_of(local)


def describe_corpus_changes(before: list[tuple[str, list[str | int]]], now: list[SourceFile]) -> list[str]:
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
