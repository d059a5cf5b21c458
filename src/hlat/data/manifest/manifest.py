"""Manifest of prepared data: its content by file and by source, the settings, and the source files.

This module checks types, ranges and file names, hlat.data.manifest.manifest_file the checksum, and
hlat.data.prepared.consistency the counts against one another and against the files.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hlat.data.formats.base import FileFormat
from hlat.data.formats.registry import format_named
from hlat.data.manifest.record_formats import RECORD_FORMATS
from hlat.data.manifest.settings import paths_by_source
from hlat.data.sources.source_file import SourceFile
from hlat.data.sources.split import SPLITS, Split
from hlat.runtime.distributed.sendable_types import sendable

WORK_VERSION = 3
"""Format version of unfinished work, and of partitions of a corpus."""
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
QUARANTINE_FILE = "quarantine.jsonl"
BLOCKS_FILE = "blocks.npy"

Count = Annotated[int, Field(strict=True, ge=0, le=1 << 62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
SourceIndex = Annotated[int, Field(strict=True, ge=-1, le=1 << 31)]


def shard_file(split: Split, index: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{index:05d}.bin"


def documents_file(split: Split) -> str:
    """Return the name of the file with the document boundaries of a split."""
    return f"{split}-documents.bin"


class StrictRecord(BaseModel):
    """Base of all records that are written next to data; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardRecord(StrictRecord):
    """A shard file."""

    file: str
    tokens: Count
    bytes: Count
    sha256: Sha256


class SourceTokens(StrictRecord):
    """Documents, tokens and UTF-8 bytes of one source in a split; the tokens of a source are contiguous."""

    source: SourceIndex
    documents: Count
    tokens: Count
    text_bytes: Count | None = None  # earlier versions counted them for the split only


class SplitRecord(StrictRecord):
    """A split: its counts and files. ``text_bytes`` counts UTF-8 bytes."""

    documents: Count
    tokens: Count
    text_bytes: Count
    sources: list[SourceTokens]
    shards: list[ShardRecord]
    documents_file: str
    documents_sha256: Sha256


class SourceRows(StrictRecord):
    """Counts of the rows of one source; each row is null, empty, unreadable, or a document.

    Attributes:
        source: index of the source; -1 for data.validation.path.
        name: its name in the recipe, if it has one.
        rows: all rows.
        null_rows: rows without text, left out.
        empty_documents: rows with an empty text, left out.
        unreadable_rows: bad rows, left out.
        documents: all other rows. A document inside which a validation tail begins is in both splits.
        copies: documents that are exact copies of earlier ones, dropped or not.
        copied_tokens: tokens of these copies, end-of-sequence tokens included.
    """

    source: SourceIndex
    name: str | None
    rows: Count
    null_rows: Count
    empty_documents: Count
    unreadable_rows: Count
    documents: Count
    copies: Count
    copied_tokens: Count


class QuarantineRecord(StrictRecord):
    """The file that lists the bad rows."""

    file: str
    rows: Count
    sha256: Sha256


@sendable
class SourceRecord(StrictRecord):
    """A source file that the data was made from; ``index`` is its companion, such as the .idx of a .bin."""

    path: str
    use: Literal["split", "validation"]
    content: Annotated[list[str | int], Field(min_length=3)]
    bytes: Count
    mtime_ns: Annotated[int, Field(strict=True)]
    sha256: str
    etag: str = ""
    index: "SourceRecord | None" = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        """Check that ``content`` begins with the index of a source."""
        if not isinstance(self.content[0], int) or self.content[0] < -1:
            raise ValueError(f"content: begins with {self.content[0]!r}, which is not the index of a source")
        return self

    @property
    def column(self) -> str:
        """Column or key of its documents."""
        return str(self.content[1])

    @property
    def format(self) -> FileFormat:
        """Its format.

        Raises:
            DataError: this version of hlat does not know it.
        """
        return format_named(str(self.content[2]))

    @property
    def files(self) -> "list[SourceRecord]":
        """The file, and its companion if it has one."""
        return [self] if self.index is None else [self, self.index]

    @classmethod
    def from_file(cls, file: SourceFile) -> "SourceRecord":
        """Make the record of a file of the corpus."""
        return cls(
            path=file.path,
            use="validation" if file.is_validation else "split",
            content=file.content,
            bytes=file.size,
            mtime_ns=file.mtime_ns,
            sha256=file.sha256,
            etag=file.etag,
            index=None if file.index is None else cls.from_file(file.index),
        )

    def to_file(self) -> SourceFile:
        """Return the file of the corpus that this record describes."""
        identity = self.bytes, self.mtime_ns, self.sha256, self.etag
        index = None if self.index is None else self.index.to_file()
        return SourceFile(self.path, self.format, self.column, int(self.content[0]), *identity, index)


class BlocksRecord(StrictRecord):
    """Blocks of text that streams read, for data that is tokenized while training (data.mode "online").

    Attributes:
        file: name of the block index file, an int64 array of shape (blocks, 3).
        sha256: hash of that file.
        bytes: size of that file.
        counts: number of blocks of each source, in the order of the sources.
        below: documents whose hash lies below this are validation documents.
    """

    file: str
    sha256: Sha256
    bytes: Count
    counts: list[Count]
    below: Annotated[int, Field(strict=True, ge=0, le=1 << 64)]


class DataManifest(StrictRecord):
    """Content of prepared data, and the settings and source files that it was made from.

    Attributes:
        format_version: version of the record, one of ``RECORD_FORMATS``.
        fingerprint: see ``content_fingerprint``.
        dtype: dtype of the tokens in the shards.
        vocab_size: number of token ids of the tokenizer.
        eos_id: end-of-sequence token; None for none.
        bos_id: begin-of-sequence token of the tokenizer, which is not in the data; None if unknown.
        tokenizer_sha256: see ``Tokenizer.sha256``.
        splits: counts and files by split.
        rows: counts of the rows by source.
        quarantine: the list of bad rows; None if there are none.
        notes: sentences for the user about this preparation.
        settings: see ``content_settings``.
        places: see ``recipe_locations``.
        sources: the source files.
        blocks: the blocks of text; None unless the text is tokenized while training.
    """

    format_version: int
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    eos_id: Count | None
    bos_id: Count | None
    tokenizer_sha256: Sha256
    splits: dict[Split, SplitRecord]
    rows: list[SourceRows]
    quarantine: QuarantineRecord | None
    notes: list[str]
    settings: dict[str, Any]
    places: dict[Literal["corpus", "tokenizer"], list[str]]
    sources: list[SourceRecord]
    blocks: BlocksRecord | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Check that all file names are those that hlat writes, so that no file outside the folder is ever opened."""
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"splits: has {sorted(self.splits)}, expected {sorted(SPLITS)}")
        if set(self.places) != {"corpus", "tokenizer"}:
            raise ValueError("places: must have exactly the keys corpus and tokenizer")
        for field, name, expected in _file_names(self):
            if name != expected:
                raise ValueError(f"{field}: file name is {name!r}, expected {expected!r}")
        return self

    @property
    def has_checksum(self) -> bool:
        """True if the manifest was written with a checksum of its own content."""
        return RECORD_FORMATS[self.format_version].has_checksum

    @property
    def source_names(self) -> dict[int, str]:
        """Name or path of each source, by its index."""
        paths = paths_by_source(self.places["corpus"])
        return {row.source: row.name or paths.get(row.source, f"source {row.source}") for row in self.rows}

    @property
    def all_rows(self) -> int:
        """Number of rows of all sources."""
        return sum(source.rows for source in self.rows)

    @property
    def null_rows(self) -> int:
        """Number of rows without text."""
        return sum(source.null_rows for source in self.rows)

    @property
    def empty_documents(self) -> int:
        """Number of rows with an empty text."""
        return sum(source.empty_documents for source in self.rows)

    @property
    def unreadable_rows(self) -> int:
        """Number of bad rows, which could not be read."""
        return sum(source.unreadable_rows for source in self.rows)

    @property
    def documents(self) -> int:
        """Number of documents of all sources, copies included."""
        return sum(source.documents for source in self.rows)

    @property
    def copies(self) -> int:
        """Number of documents that are exact copies of earlier ones."""
        return sum(source.copies for source in self.rows)

    @property
    def copies_dropped(self) -> bool:
        """True if copies were left out."""
        return bool(self.settings.get("data.duplicates") == "drop")


def content_fingerprint(
    tokenizer_sha256: str,
    dtype: str,
    splits: dict[Split, SplitRecord],
    sources: list[SourceRecord] | None = None,
    blocks: BlocksRecord | None = None,
) -> str:
    """Compute the fingerprint of prepared data: a hash of its tokenizer and shards.

    Args:
        tokenizer_sha256: see ``Tokenizer.sha256``.
        dtype: dtype of the tokens.
        splits: shards by split.
        sources: source files; used only together with ``blocks``.
        blocks: if the text is tokenized while training, its blocks.
    """
    shards = [[shard.sha256 for shard in splits[split].shards] for split in SPLITS]
    content: list[Any] = [tokenizer_sha256, dtype, shards]
    if blocks is not None:
        content += [[source.content for source in sources or []], blocks.model_dump()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _file_names(manifest: DataManifest) -> Iterator[tuple[str, str, str]]:
    """Yield the field, the name, and the expected name of every file in a manifest."""
    for split, record in manifest.splits.items():
        yield f"splits.{split}.documents_file", record.documents_file, documents_file(split)
        for index, shard in enumerate(record.shards):
            yield f"splits.{split}.shards.{index}.file", shard.file, shard_file(split, index)
    if manifest.quarantine is not None:
        yield "quarantine.file", manifest.quarantine.file, QUARANTINE_FILE
    if manifest.blocks is not None:
        yield "blocks.file", manifest.blocks.file, BLOCKS_FILE
