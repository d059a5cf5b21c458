"""A path, folder or glob -> a sorted list of files with fingerprints -> the documents of a corpus, in order.

The order of the files is the order of their paths, so it is the same on every machine; the fingerprint of a file is
its size and the sha256 of its content.
"""

import glob
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.config import DataConfig
from hlat.data.readers import TEXT, kind_of
from hlat.runtime import DataError

_CHUNK = 1 << 20


class NothingThere(DataError):
    """Where the recipe looks for text there is nothing."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus.

    Attributes:
        path: where it is.
        column: column or key of its text.
        source: index of the source it belongs to; -1 for data.validation.path.
        size, mtime_ns: as the file system says; together a cheap sign that the file is still the same.
        sha256: of its content.
    """

    path: Path
    column: str
    source: int
    size: int
    mtime_ns: int
    sha256: str = ""

    @property
    def is_validation(self) -> bool:
        """Whether the whole file is validation text."""
        return self.source < 0

    @property
    def content(self) -> list[str | int]:
        """What of it decides the prepared tokens."""
        return [self.source, self.column, kind_of(self.path), self.size, self.sha256]

    def check_unchanged(self) -> None:
        """Raise DataError if the file is no longer the one that was fingerprinted."""
        now = _stat(self.path)
        if now != (self.size, self.mtime_ns):
            raise DataError(f"{self.path}: the file changed while it was being read. Run again once it is complete.")


def list_files(config: DataConfig) -> list[SourceFile]:
    """The files of a data section, in the order in which their documents follow one another, not yet hashed.

    Raises:
        NothingThere: nothing at a path.
        DataError: no source, a file that is known not to be text, or text and record files mixed in one folder.
    """
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
    files = [
        SourceFile(file, column, index, *_stat(file)) for index, path, column in named for file in find_files(path)
    ]
    for file in files:
        kind_of(file.path)  # refuses endings that are no text, before terabytes are hashed
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
        files = sorted(file for file in root.rglob("*") if file.is_file() and not _hidden(file.relative_to(root)))
        if not files:
            raise DataError(f"{path}: the folder holds no files")
        _check_one_kind(path, files)
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
    files: list[SourceFile], known: dict[tuple[str, int, int], str], progress: Callable[[int, int], None]
) -> list[SourceFile]:
    """The files with their sha256.

    Args:
        files: from list_files.
        known: (path, size, mtime_ns) -> sha256 of files hashed before, which are not read again.
        progress: called with bytes done and bytes in all.
    """
    total = sum(file.size for file in files)
    done = 0
    hashed = []
    for file in files:
        sha256 = known.get((str(file.path), file.size, file.mtime_ns)) or _sha256(file.path)
        hashed.append(SourceFile(file.path, file.column, file.source, file.size, file.mtime_ns, sha256))
        done += file.size
        progress(done, total)
    return hashed


def corpus_changes(before: list[tuple[str, list[str | int]]], now: list[SourceFile]) -> list[str]:
    """One sentence on how a corpus differs from what it was, by content and order; nothing for one that was moved.

    Args:
        before: path and ``SourceFile.content`` of each file, in order.
        now: the files, fingerprinted.
    """
    if [content for _, content in before] == [file.content for file in now]:
        return []
    old, new = dict(before), {str(file.path): file.content for file in now}
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


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_one_kind(path: str, files: list[Path]) -> None:
    texts = [file for file in files if kind_of(file) == TEXT]
    if texts and len(texts) < len(files):
        record = next(file for file in files if kind_of(file) != TEXT)
        raise DataError(
            f"{path}: the folder mixes text files ({texts[0].name}) with {kind_of(record)} files ({record.name}), so "
            f"which are the corpus is not clear. Name them with a glob such as {path.rstrip('/')}/**/*{record.suffix}"
        )
