"""List and hash the files of a corpus.

    path, folder, glob or URL --list--> sorted files with their formats --hash--> files with fingerprints

The fingerprint of a file is its size and the sha256 of its content. It does not depend on the location of the file,
local or remote.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hlat.config import DataConfig
from hlat.data.formats.base import FileFormat
from hlat.data.formats.registry import folder_format
from hlat.data.sources.columns import SourceColumn, default_column, source_columns
from hlat.data.sources.companions import join_companions
from hlat.data.sources.findings import FileFinding, refuse
from hlat.data.sources.listing import ListedFile, Listing, SourceNotFoundError, find_file, list_source
from hlat.data.sources.source_checks import check_folder, check_source, check_tokenizer_given, path_format
from hlat.data.sources.source_file import SourceFile, Stamp, sha256_of
from hlat.data.stores.cache import Cache
from hlat.data.stores.fetching import CachedStore
from hlat.data.stores.prefetch import prefetch_in_order
from hlat.data.stores.remote import Store, StoreAccessError, local_path
from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import plural
from hlat.runtime.urls import is_url

CACHE_FOLDER = "cache"
"""Subfolder of the prepared data with the cache of remote files, unless data.cache_dir names another folder."""


def list_files(config: DataConfig, folder: Path) -> list[SourceFile]:
    """List the files of a data section in the order of their documents; they are not hashed yet.

    Args:
        config: the data section.
        folder: folder of the prepared data; it contains the cache of remote files unless ``data.cache_dir`` is set.

    Raises:
        SourceNotFoundError: a path or glob has no files, or some that cannot be listed or are of no format.
        DataError: there is no source, files that cannot be one source, a
            .bin or .idx without the other, tokens without a tokenizer, or a URL that cannot be used.
    """
    cache = Cache(*cache_location(config, folder))
    files = [file for source in numbered_sources(config) for file in files_of_source(source, cache)]
    for file in files:
        if file.format.holds_tokens:
            check_tokenizer_given(file.path, config.tokenizer.path)
    return files


class NumberedSource(NamedTuple):
    """A source of a data section: its number, which is -1 for data.validation.path, its path and its column."""

    number: int
    path: str
    column: SourceColumn


def numbered_sources(config: DataConfig) -> list[NumberedSource]:
    """Return the sources of a data section in the order of their documents, and its validation text.

    Raises:
        DataError: there is no source.
    """
    paths = [*([] if config.path is None else [config.path]), *(source.path for source in config.sources)]
    if not paths:
        raise DataError(
            "data: no corpus. Set data.path to a file, folder or glob, for example data.path=corpus/**/*.txt"
        )
    numbered = [NumberedSource(*each) for each in zip(range(len(paths)), paths, source_columns(config), strict=True)]
    if config.validation.path is not None:
        numbered.append(NumberedSource(-1, config.validation.path, default_column(config)))
    return numbered


def cache_location(config: DataConfig, folder: Path) -> tuple[Path, int]:
    """Return the folder of the cache of remote files, and its maximum size in bytes."""
    return Path(config.cache_dir or folder / CACHE_FOLDER), int(config.cache_gib * 2**30)


def open_cached_store(path: str, cache: Cache) -> CachedStore | None:
    """Open the store of a URL together with the cache; return None for a local path."""
    return CachedStore(Store(path), cache) if is_url(path) else None


def files_of_source(source: NumberedSource, cache: Cache) -> list[SourceFile]:
    """List the files of one source, each with its companion.

    Raises:
        SourceNotFoundError: the path or glob has no files, or some that cannot be listed or are of no format.
        DataError: as ``list_files``.
    """
    number, path, column = source

    def source_file(file: ListedFile, file_format: FileFormat) -> SourceFile:
        identity = file.size, file.mtime_ns
        return SourceFile(
            file.path, file_format, column.name, number, *identity, etag=file.etag, cached_store=file.cached_store
        )

    def find_companion(file: SourceFile, companion: str) -> SourceFile | None:
        try:
            found = find_file(companion, cache)
        except StoreAccessError as error:
            assert file.format.companion is not None, "only such files have companions"
            raise DataError(f"{error} {file.format.companion.rule}.") from error
        return None if found is None else source_file(found, file.format)

    listing = list_source(path, cache)
    refuse(path, listing.findings, SourceNotFoundError)
    if listing.names is not None and (known := _known_folder(path, listing, column)) is not None:
        return [source_file(file, known[0]) for file in known[1]]
    files, findings = list[SourceFile](), list[FileFinding]()
    for listed in listing.files:
        try:
            files.append(source_file(listed, path_format(listed.path, column.kind)))
        except DataError as error:
            findings.append(FileFinding.of_error(listed.path, error))
    refuse(path, findings, SourceNotFoundError)
    if listing.names is not None:
        check_folder(path, files)
    check_source(path, files)  # before hashing, which may take hours
    return join_companions(files, find_companion)


def _known_folder(path: str, listing: Listing, column: SourceColumn) -> tuple[FileFormat, list[ListedFile]] | None:
    """Return the format and the files of a folder that is one data set; None for an ordinary folder."""
    assert listing.names is not None, "the source is a folder"
    try:
        found = folder_format(listing.names, listing.read, column.kind)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if found is None:
        return None
    files = dict(zip(listing.names, listing.files, strict=True))
    return found[0], [files[name] for name in found[1]]


def without_linked_folders(config: DataConfig, files: list[SourceFile]) -> list[SourceFile]:
    """Return the files that are not behind a link below a folder: earlier versions of hlat followed no such links."""
    roots = {source.number: Path(local_path(source.path)) for source in numbered_sources(config)}

    def is_linked(file: SourceFile) -> bool:
        parents = Path(file.path).parents if file.cached_store is None else ()
        return any(folder.is_symlink() for folder in parents if roots[file.source] in folder.parents)

    return [file for file in files if not is_linked(file)]


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
    counts = f"from {plural(len(before), 'file')}, now {len(now)}: " if len(before) != len(now) else ""
    return [f"the corpus: {counts}{', '.join(phrases) or 'the same files in another order, source or text column'}"]


def _more(count: int) -> str:
    return f" and {count} more" if count else ""
