"""List, check and hash the files of a corpus.

    data.sources[] --source_listing--> files --companions joined, checked--> sorted files with their formats
                   --hash--> files with fingerprints
    data.sources[].text_column, else data.text_column --> kind and name of the column

    a.bin  a.idx  b.bin --> a.bin (a.idx), b.bin (b.idx, searched next to it)

The fingerprint of a file is its size and the sha256 of its content. It does not depend on the location of the file,
local or remote.

Refused before hashing, which may take hours, are: a folder that mixes text files with record files, a source that mixes
tokens with text, and tokens without a tokenizer. A format whose files consist of two has the second as the first one's
``index``.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hlat.config import DataConfig
from hlat.data.formats.base import Companion, FileFormat
from hlat.data.formats.registry import folder_format, format_of
from hlat.data.formats.rows import COLUMN_KINDS, TEXT_COLUMN, ColumnKind
from hlat.data.formats.streams import COMPRESSED_ENDINGS
from hlat.data.source_file import SourceFile, Stamp, prefetch_in_order, sha256_of
from hlat.data.source_listing import (
    FileFinding,
    Listing,
    SourceNotFoundError,
    find_file,
    list_source,
    more,
    refuse,
)
from hlat.data.stores.cache import Cache
from hlat.data.stores.fetching import CachedStore
from hlat.data.stores.remote import Store, StoreAccessError, StoredFile, url_file_name
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import plural
from hlat.runtime.urls import is_url


class SourceColumn(NamedTuple):
    """Kind and name of the column that holds the documents of a source."""

    kind: ColumnKind
    name: str


def default_column(config: DataConfig, *sections: Any) -> SourceColumn:
    """Return the first column that some sections name, or else that of data.path and data.validation.path."""
    named = ((kind, getattr(section, kind.field)) for section in (*sections, config) for kind in COLUMN_KINDS)
    return next(SourceColumn(kind, name) for kind, name in named if name is not None)


def join_companions(
    # Finds a companion by its path; None if it does not exist.
    files: Sequence[SourceFile],
    find: Callable[[SourceFile, str], SourceFile | None],
) -> list[SourceFile]:
    """Attach each companion to its file, in the order given; DataError if one of the two is missing."""
    listed = {file.path: (file, file.format.companion) for file in files}
    found = {path: file for path, (file, pair) in listed.items() if pair is not None and _ends(path, pair.ending)}
    # Listed companions are used first. Others are looked up, so that a glob over the .bin files alone is enough.
    joined = []
    for file, pair in listed.values():
        if pair is None:
            joined.append(file)
        elif _ends(file.path, pair.main):
            path = _companion_path(file.path, pair)
            companion = found.pop(path, None) or find(file, path)
            if companion is None:
                raise DataError(f"{file.path}: {path} is missing. {pair.rule}; hlat reads no other {pair.main} files.")
            joined.append(replace(file, index=companion))
    for path, file in found.items():
        pair = file.format.companion
        assert pair is not None, "only files of such formats were collected"
        raise DataError(
            f"{path}: its {pair.main}, which contains the tokens, is not in the source. {pair.rule}: name the "
            f"{pair.main}."
        )
    return joined


def _ends(path: str, ending: str) -> bool:
    name = url_file_name(path) if is_url(path) else path
    return name.lower().endswith(ending)


def _companion_path(main: str, pair: Companion) -> str:
    # Only the name is replaced: a web URL keeps its query, which may be a signature.
    name = url_file_name(main) if is_url(main) else main
    head, _, tail = main.rpartition(name)
    return head + pair.path(name) + tail


def path_format(path: str, column: ColumnKind, own: Sequence[str] = ()) -> FileFormat:
    """Return the format of a path or URL, perhaps one of the user's own; DataError if hlat does not read such files."""
    if not is_url(path):
        return format_of(Path(path), column, own)
    name = Path(url_file_name(path))
    try:
        return format_of(name, column, own)
    except DataError as error:
        # With the full URL: files in several folders may have the same name.
        raise DataError(str(error).replace(str(name), path, 1)) from error


def file_ending(path: str) -> str:
    """Return the ending of a file's name as a glob has it, with that of its compression: .jsonl.zst; or nothing."""
    suffixes = Path(url_file_name(path)).suffixes
    is_packed = bool(suffixes) and suffixes[-1].lower() in COMPRESSED_ENDINGS
    return "".join(suffixes[-2:] if is_packed else suffixes[-1:])


def is_read(path: str) -> bool:
    """Return True if hlat reads files of such a name as text or from a column of text."""
    try:
        return path_format(path, TEXT_COLUMN).accepts(TEXT_COLUMN)
    except DataError:
        return False


_NAMED_ENDINGS = 3
_FINISHED = "_SUCCESS"  # an empty file that jobs of Spark and Hadoop leave beside what they wrote


def one_kind(path: str, files: list[SourceFile]) -> list[SourceFile]:
    """Return the files of a folder; DataError for texts and record files, of which either may be the corpus."""
    record = next((file for file in files if not file.format.is_one_document), None)
    if record is not None:
        files = [file for file in files if file.size or Path(url_file_name(file.path)).name != _FINISHED]
    texts = [file for file in files if file.format.is_one_document]
    if texts and record is not None:
        text, other = (Path(url_file_name(file.path)) for file in (texts[0], record))
        counts = Counter(file_ending(file.path) for file in files).most_common(_NAMED_ENDINGS)
        globs = [f"{{path: {path.rstrip('/')}/**/*{ending}}}" for ending, _ in counts if ending]
        raise DataError(
            f"{path}: the folder mixes text files ({text}) with {record.format.kind} files ({other}). Name those that "
            f"are the corpus, each format a source: data.sources=[{', '.join(globs)}]. `hlat init {path}` drafts them."
        )
    return files


_UNFINISHED = re.compile(r"/_temporary/\d+/")  # below it Hadoop's tasks write, until they are committed
_PARQUET = (".parquet", ".parq", ".pq")  # files of the rows of a table: texts near its log are no part of it
_ICEBERG = re.compile(r"(v\d+|\d{5,}-[0-9a-f-]{36})(\.gz)?\.metadata\.json(\.gz)?")


def _unfinished_or_table(path: str, listing: Listing) -> Iterator[FileFinding]:
    """Yield what shows that only some of the files are the data: a job that did not finish, or the log of a table."""
    names = [file.path for file in listing.files]
    unfinished = next((found for name in names if (found := _UNFINISHED.search(f"/{name}"))), None)
    if unfinished is not None and not _UNFINISHED.search(f"/{path}/"):
        problem = (
            "files that a job of Spark or Hadoop had not finished. If none runs now, leave them out with a glob, or "
            "remove the folder."
        )
        yield FileFinding(unfinished.string[1 : unfinished.end()].rstrip("/"), problem)
    elif (table := _table(names, is_url(path))) is not None:
        folder, kind = table
        problem = (
            f"the folder of a table of {kind}, whose files hold removed and replaced rows too. Write its rows of today "
            f'to a new folder by a program that knows such tables; in Spark: spark.read.format("{kind.lower()}")'
            ".load(FOLDER).write.parquet(NEW). To train on the files as they are, copy them elsewhere."
        )
        yield FileFinding(folder, problem)


def _table(names: Sequence[str], remote: bool) -> tuple[str, str] | None:
    """Return the folder of a table that files belong to, and its kind. Of a store only the names are known."""
    if remote:
        logs = (name.partition("/_delta_log/") for name in names)
        return next(((folder, "Delta") for folder, log, _ in logs if log), None)
    inner = {Path(folder).absolute() for folder in {_folder(name) for name in names if name.endswith(_PARQUET)}}
    for folder in sorted(inner.union(*(each.parents for each in inner))):
        for log, kind in (("_delta_log", "Delta"), (".hoodie", "Hudi")):
            if _is_folder(folder / log):
                return str(folder), kind
        metadata = folder.parent / "metadata"
        if (
            folder.name == "data"
            and _is_folder(metadata)
            and any(_ICEBERG.fullmatch(file.name) for file in metadata.iterdir())
        ):
            return str(folder.parent), "Iceberg"
    return None


def _folder(name: str) -> str:
    return name.rpartition("/")[0] or ("/" if name.startswith("/") else ".")


def _is_folder(path: Path) -> bool:
    """True if a folder exists and may be listed: one above the corpus can be another user's."""
    return os.access(path, os.R_OK | os.X_OK) and path.is_dir()


def check_source(path: str, files: Sequence[SourceFile]) -> None:
    """Raise DataError for a source of tokens and text, whose lengths cannot be added."""
    tokens = [file for file in files if file.format.holds_tokens]
    if tokens and len(tokens) < len(files):
        other = next(file for file in files if not file.format.holds_tokens)
        raise DataError(
            f"{path}: tokens ({tokens[0].path}) and {other.format.kind} files ({other.path}) in one source. Make them "
            "two entries of data.sources, each with a glob."
        )


# Subfolder of the prepared data with the cache of remote files, unless data.cache_dir names another folder.
CACHE_FOLDER = "cache"


def list_files(config: DataConfig, folder: Path) -> list[SourceFile]:
    """List the files of a data section in the order of their documents; they are not hashed yet.

    Remote files are cached in ``folder`` (prepared data) unless ``data.cache_dir`` is set. SourceNotFoundError if a
    path or glob has no files, or some that cannot be listed or are of no format. DataError without a source, for files
    that cannot be one source, a .bin or .idx without the other, tokens without a tokenizer, or an unusable URL.
    """
    cache = Cache(*cache_location(config, folder))
    sources = numbered_sources(config)
    if not any(source.number >= 0 for source in sources):
        raise DataError(
            "data: no corpus. Set data.path to a file, folder or glob, for example data.path=corpus/**/*.txt"
        )
    files = [file for source in sources for file in files_of_source(source, cache)]
    tokens = next((file.path for file in files if file.format.holds_tokens), None)
    if tokens is not None and config.tokenizer.path is None:
        raise DataError(
            f"{tokens}: its documents are tokens, but data.tokenizer.path is not set. A tokenizer trained by hlat "
            "would give the ids other meanings. Set data.tokenizer.path to the tokenizer that the dataset was written "
            "with: a tokenizer.json, a SentencePiece .model, or the folder of one."
        )
    return files


class NumberedSource(NamedTuple):
    """A source of a data section, its place in it and its column of documents."""

    number: int  # -1 for data.validation.path
    field: str  # dotted name of the field with the path
    path: str
    column: SourceColumn
    name: str | None  # its name in the recipe, if it has one
    formats: tuple[str, ...] = ()  # file formats of the user's own


def numbered_sources(config: DataConfig) -> list[NumberedSource]:
    """Return the sources in the order of their documents, then the validation text."""
    own = [] if config.path is None else [("data.path", config.path, default_column(config), None)]
    others = (
        (f"data.sources.{index}.path", source.path, default_column(config, source), source.name)
        for index, source in enumerate(config.sources)
    )
    numbered = [NumberedSource(number, *each, config.formats) for number, each in enumerate([*own, *others])]
    if (path := config.validation.path) is not None:
        numbered.append(
            NumberedSource(-1, "data.validation.path", path, default_column(config), "validation", config.formats)
        )
    return numbered


def cache_location(config: DataConfig, folder: Path) -> tuple[Path, int]:
    """Return the folder of the cache of remote files, and its maximum size in bytes."""
    return Path(config.cache_dir or folder / CACHE_FOLDER), int(config.cache_gib * 2**30)


def open_cached_store(path: str, cache: Cache) -> CachedStore | None:
    """Open the store of a URL together with the cache; return None for a local path."""
    return CachedStore(Store(path), cache) if is_url(path) else None


def files_of_source(source: NumberedSource, cache: Cache) -> list[SourceFile]:
    """List the files of one source with their companions; errors as ``list_files``."""
    path, column = source.path, source.column

    def source_file(file: StoredFile, store: CachedStore | None, file_format: FileFormat) -> SourceFile:
        stamp = file.size, file.mtime_ns
        return SourceFile(
            file.path, file_format, column.name, source.number, *stamp, etag=file.etag, cached_store=store
        )

    def find_companion(file: SourceFile, companion: str) -> SourceFile | None:
        try:
            found = find_file(companion, store := open_cached_store(companion, cache))
        except StoreAccessError as error:
            assert file.format.companion is not None, "only such files have companions"
            raise DataError(f"{error} {file.format.companion.rule}.") from error
        return None if found is None else source_file(found, store, file.format)

    listing = list_source(path, cache)
    # A link to nowhere may have been half of the corpus: refuse it instead of training on the rest.
    refuse(path, [*listing.findings, *_unfinished_or_table(path, listing)], SourceNotFoundError)
    # A folder that is one data set says itself which files are data. Its other files (JSON) would be refused below.
    if listing.names is not None and (known := _known_folder(path, listing, column)) is not None:
        return [source_file(file, listing.cached_store, known[0]) for file in known[1]]
    files, findings = list[SourceFile](), list[FileFinding]()
    for listed in listing.files:
        try:
            file_format = path_format(listed.path, column.kind, source.formats)
            files.append(source_file(listed, listing.cached_store, file_format))
        except DataError as error:
            findings.append(FileFinding.of_error(listed.path, error))
    refuse(path, findings, SourceNotFoundError)
    if listing.names is not None:
        files = one_kind(path, files)
    check_source(path, files)  # before hashing, which may take hours
    return join_companions(files, find_companion)


def _known_folder(path: str, listing: Listing, column: SourceColumn) -> tuple[FileFormat, list[StoredFile]] | None:
    """Return format and files of a folder that is one data set; None for an ordinary folder."""
    assert listing.names is not None, "the source is a folder"
    try:
        found = folder_format(listing.names, listing.read, column.kind)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if found is None:
        return None
    files = dict(zip(listing.names, listing.files, strict=True))
    return found[0], [files[name] for name in found[1]]


def hash_files(
    files: list[SourceFile], known: dict[Stamp, str], progress: Callable[[int, int], None]
) -> list[SourceFile]:
    """Return the files with their sha256, for which remote ones are fetched; ``known`` ones are not read again."""
    # In this order, each companion follows its file, as the loop below takes them.
    hashes = _iter_hashes([file for source_file in files for file in source_file.files], known, progress)
    hashed = []
    for file in files:
        own = replace(file, sha256=next(hashes))
        hashed.append(own if own.index is None else replace(own, index=replace(own.index, sha256=next(hashes))))
    return hashed


def _iter_hashes(
    files: list[SourceFile], known: dict[Stamp, str], progress: Callable[[int, int], None]
) -> Iterator[str]:
    done, total = 0, sum(file.size for file in files)
    hashes = [known.get(file.stamp) or file.cached_sha256 for file in files]
    unknown = [file for file, sha256 in zip(files, hashes, strict=True) if sha256 is None]
    # Closing, so that threads which fetch ahead stop if the caller does.
    with closing(prefetch_in_order(unknown)) as opened:
        computed = (file.cached_sha256 or sha256_of(local) for file, local in opened)
        for file, sha256 in zip(files, hashes, strict=True):
            found = sha256 or next(computed)
            done += file.size
            progress(done, total)
            yield found


def describe_corpus_changes(before: list[tuple[str, list[str | int]]], now: list[SourceFile]) -> list[str]:
    """Say in one sentence how a corpus has changed in content or order; empty if it was only moved."""
    # Without paths: a corpus that was moved is the same corpus.
    if [content for _, content in before] == [file.content for file in now]:
        return []
    old, new = dict(before), {file.path: file.content for file in now}
    size_and_hash = slice(3, None)  # of SourceFile.content, after source, column and format
    changes = {
        "changed since": [path for path in new if path in old and new[path][size_and_hash] != old[path][size_and_hash]],
        "new": [path for path in new if path not in old],
        "gone": [path for path in old if path not in new],
    }
    phrases = [f"{paths[0]}{more(paths)} {change}" for change, paths in changes.items() if paths]
    counts = f"from {plural(len(before), 'file')}, now {len(now)}: " if len(before) != len(now) else ""
    return [f"the corpus: {counts}{', '.join(phrases) or 'the same files in another order, source or text column'}"]
