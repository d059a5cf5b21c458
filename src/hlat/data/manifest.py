"""The manifest of prepared data: what it holds, file by file and source by source, and what it was made from."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hlat.data.settings import paths_by_source
from hlat.data.source_file import SourceFile
from hlat.data.split import SPLITS, Split
from hlat.runtime import DataError

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"


class Record(BaseModel):
    """A piece of what is written beside data; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardRecord(Record):
    """One shard file."""

    file: str
    tokens: int
    bytes: int
    sha256: str


class SourceTokens(Record):
    """What a split holds of one source: a stretch of its tokens, the sources one after the other."""

    source: int
    documents: int
    tokens: int


class SplitRecord(Record):
    """One split: what it holds and in which files. ``text_bytes`` is UTF-8."""

    documents: int
    tokens: int
    text_bytes: int
    sources: list[SourceTokens]
    shards: list[ShardRecord]
    documents_file: str
    documents_sha256: str


class SourceRows(Record):
    """What became of the rows of one source: null, empty, unreadable, or a document.

    Attributes:
        source: its index; -1 for data.validation.path.
        name: what the recipe calls it, if it gives it a name.
        rows: read in all.
        null_rows, empty_documents, unreadable_rows: left out.
        documents: the others. A document inside which a validation tail begins is in both splits.
        copies: documents that are exact copies of earlier ones, dropped or not.
        copied_tokens: tokens of these, end tokens included.
    """

    source: int
    name: str | None
    rows: int
    null_rows: int
    empty_documents: int
    unreadable_rows: int
    documents: int
    copies: int
    copied_tokens: int


class QuarantineRecord(Record):
    """The file that lists the rows that could not be read."""

    file: str
    rows: int
    sha256: str


class SourceRecord(Record):
    """One file that the data was made from; ``index`` is the .idx of a file of tokens."""

    path: str
    use: Literal["split", "validation"]
    content: list[str | int]
    bytes: int
    mtime_ns: int
    sha256: str
    etag: str = ""
    index: "SourceRecord | None" = None

    @property
    def parts(self) -> "list[SourceRecord]":
        """The file, and its .idx if it has one."""
        return [self] if self.index is None else [self, self.index]

    @classmethod
    def of(cls, file: SourceFile) -> "SourceRecord":
        """The record of a file of the corpus."""
        return cls(
            path=file.path,
            use="validation" if file.is_validation else "split",
            content=file.content,
            bytes=file.size,
            mtime_ns=file.mtime_ns,
            sha256=file.sha256,
            etag=file.etag,
            index=None if file.index is None else cls.of(file.index),
        )

    def file(self) -> SourceFile:
        """The file of the corpus that this is the record of."""
        source, column = self.content[:2]
        known = self.bytes, self.mtime_ns, self.sha256, self.etag
        index = None if self.index is None else self.index.file()
        return SourceFile(self.path, str(column), int(source), *known, index)


class BlocksRecord(Record):
    """Where text is tokenized while training: the blocks that are dealt to streams.

    Attributes:
        file, sha256: the catalogue, int64 (blocks, 3).
        bytes: of that file.
        counts: how many of its blocks are each source's, in the order of the sources.
        below: documents whose hash lies below this are validation text.
    """

    file: str
    sha256: str
    bytes: int
    counts: list[int]
    below: int


class Manifest(Record):
    """What prepared data is and what it was made from."""

    format_version: int
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    tokenizer_sha256: str
    splits: dict[Split, SplitRecord]
    rows: list[SourceRows]
    quarantine: QuarantineRecord | None
    notes: list[str]
    settings: dict[str, Any]
    places: dict[Literal["corpus", "tokenizer"], list[str]]
    sources: list[SourceRecord]
    blocks: BlocksRecord | None = None

    @property
    def source_names(self) -> dict[int, str]:
        """What to call each source, by its index: its name, or where it is."""
        paths = paths_by_source(self.places["corpus"])
        return {row.source: row.name or paths.get(row.source, f"source {row.source}") for row in self.rows}

    @property
    def all_rows(self) -> int:
        """Rows of all sources."""
        return sum(source.rows for source in self.rows)

    @property
    def null_rows(self) -> int:
        """Rows without text."""
        return sum(source.null_rows for source in self.rows)

    @property
    def empty_documents(self) -> int:
        """Rows whose text is empty."""
        return sum(source.empty_documents for source in self.rows)

    @property
    def unreadable_rows(self) -> int:
        """Rows that could not be read."""
        return sum(source.unreadable_rows for source in self.rows)

    @property
    def documents(self) -> int:
        """Documents of all sources, copies included."""
        return sum(source.documents for source in self.rows)

    @property
    def copies(self) -> int:
        """Documents that are exact copies of earlier ones."""
        return sum(source.copies for source in self.rows)

    @property
    def copies_dropped(self) -> bool:
        """Whether copies were left out."""
        return bool(self.settings.get("data.duplicates") == "drop")


def content_fingerprint(
    tokenizer_sha256: str,
    dtype: str,
    splits: dict[Split, SplitRecord],
    sources: list[SourceRecord] | None = None,
    blocks: BlocksRecord | None = None,
) -> str:
    """The fingerprint of prepared data: its tokens, shard by shard, and the tokenizer; online, the files and blocks."""
    shards = [[shard.sha256 for shard in splits[split].shards] for split in SPLITS]
    content: list[Any] = [tokenizer_sha256, dtype, shards]
    if blocks is not None:
        content += [[source.content for source in sources or []], blocks.model_dump()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None if it has none.

    Raises:
        DataError: damaged, or of another format.
    """
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_bytes())
        if isinstance(stored, dict) and stored.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            raise DataError(
                f"{path}: data format {stored['format_version']}; this version reads {FORMAT_VERSION}. "
                "Prepare the data again in another data.prepared_dir, or use the version of hlat that wrote it."
            )
        return Manifest.model_validate(stored)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(f"{path}: damaged: {error}. Delete {folder} and prepare the data again.") from error
