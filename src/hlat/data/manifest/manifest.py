"""The manifest of prepared data: what it holds, file by file and source by source, and what it was made from.

Types, ranges and names of files are checked here, the checksum by hlat.data.manifest.manifest_file, and its counts
against one another and against the files by hlat.data.prepared.consistency.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hlat.data.manifest.settings import paths_by_source
from hlat.data.sources import SPLITS, SourceFile, Split
from hlat.runtime.distributed import sendable

FORMAT_VERSION = 4
"""The format that is written. Format 3, the only other one that is read, is the same without a checksum of its own."""
VERSION_WITHOUT_CHECKSUM = 3
WORK_VERSION = 3
"""The format of unfinished work, and of parts of a corpus."""
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
QUARANTINE_FILE = "quarantine.jsonl"
BLOCKS_FILE = "blocks.npy"

Count = Annotated[int, Field(strict=True, ge=0, le=1 << 62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
SourceIndex = Annotated[int, Field(strict=True, ge=-1, le=1 << 31)]


def shard_file(split: Split, index: int) -> str:
    """The name of a shard."""
    return f"{split}-{index:05d}.bin"


def documents_file(split: Split) -> str:
    """The name of the file that says where the documents of a split begin."""
    return f"{split}-documents.bin"


class StrictRecord(BaseModel):
    """A piece of what is written beside data; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardRecord(StrictRecord):
    """One shard file."""

    file: str
    tokens: Count
    bytes: Count
    sha256: Sha256


class SourceTokens(StrictRecord):
    """What a split holds of one source: a stretch of its tokens, the sources one after the other."""

    source: SourceIndex
    documents: Count
    tokens: Count


class SplitRecord(StrictRecord):
    """One split: what it holds and in which files. ``text_bytes`` is UTF-8."""

    documents: Count
    tokens: Count
    text_bytes: Count
    sources: list[SourceTokens]
    shards: list[ShardRecord]
    documents_file: str
    documents_sha256: Sha256


class SourceRows(StrictRecord):
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
    """The file that lists the rows that could not be read."""

    file: str
    rows: Count
    sha256: Sha256


@sendable
class SourceRecord(StrictRecord):
    """One file that the data was made from; ``index`` is the .idx of a file of tokens."""

    path: str
    use: Literal["split", "validation"]
    content: Annotated[list[str | int], Field(min_length=2)]
    bytes: Count
    mtime_ns: Annotated[int, Field(strict=True)]
    sha256: str
    etag: str = ""
    index: "SourceRecord | None" = None

    @model_validator(mode="after")
    def _content(self) -> Self:
        """Refuse a content that does not begin with the index of a source."""
        if not isinstance(self.content[0], int) or self.content[0] < -1:
            raise ValueError(f"content: begins with {self.content[0]!r}, which is not the index of a source")
        return self

    @property
    def files(self) -> "list[SourceRecord]":
        """The file, and its .idx if it has one."""
        return [self] if self.index is None else [self, self.index]

    @classmethod
    def from_file(cls, file: SourceFile) -> "SourceRecord":
        """The record of a file of the corpus."""
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
        """The file of the corpus that this is the record of."""
        source, column = self.content[:2]
        known = self.bytes, self.mtime_ns, self.sha256, self.etag
        index = None if self.index is None else self.index.to_file()
        return SourceFile(self.path, str(column), int(source), *known, index)


class BlocksRecord(StrictRecord):
    """Where text is tokenized while training: the blocks that are dealt to streams.

    Attributes:
        file, sha256: the catalogue, int64 (blocks, 3).
        bytes: of that file.
        counts: how many of its blocks are each source's, in the order of the sources.
        below: documents whose hash lies below this are validation text.
    """

    file: str
    sha256: Sha256
    bytes: Count
    counts: list[Count]
    below: Annotated[int, Field(strict=True, ge=0, le=1 << 64)]


class DataManifest(StrictRecord):
    """What prepared data is and what it was made from."""

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
    def _names(self) -> Self:
        """Refuse any file name but the one that is written: nothing outside the folder is ever opened."""
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"splits: has {sorted(self.splits)}, and these are {sorted(SPLITS)}")
        if set(self.places) != {"corpus", "tokenizer"}:
            raise ValueError("places: must have exactly the keys corpus and tokenizer")
        for where, name, written in _file_names(self):
            if name != written:
                raise ValueError(f"{where}: file name is {name!r}, expected {written!r}")
        return self

    @property
    def has_checksum(self) -> bool:
        """Tell whether the manifest was written with a checksum of its own."""
        return self.format_version != VERSION_WITHOUT_CHECKSUM

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


def _file_names(manifest: DataManifest) -> Iterator[tuple[str, str, str]]:
    """Every file that a manifest names: the field, the name in it, and the name that is written there."""
    for split, record in manifest.splits.items():
        yield f"splits.{split}.documents_file", record.documents_file, documents_file(split)
        for index, shard in enumerate(record.shards):
            yield f"splits.{split}.shards.{index}.file", shard.file, shard_file(split, index)
    if manifest.quarantine is not None:
        yield "quarantine.file", manifest.quarantine.file, QUARANTINE_FILE
    if manifest.blocks is not None:
        yield "blocks.file", manifest.blocks.file, BLOCKS_FILE
