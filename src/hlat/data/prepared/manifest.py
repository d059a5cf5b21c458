"""Manifest of prepared data: its content by file and by source, the settings, the source files; and its JSON file.

    DataManifest --fields--> JSON object with format_version and checksum --> manifest.json
    manifest.json --checksum--> fields | ValueError: it is damaged --types, ranges, names--> DataManifest

This module checks the checksum, types, ranges and file names; hlat.data.prepared.consistency checks the counts against
one another and against the files. Other JSON records of prepared data are written and read in the same way
(``write_record``, ``read_record``).
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hlat.data.documents import SPLITS, Split
from hlat.data.formats.base import FileFormat
from hlat.data.formats.registry import format_named
from hlat.data.source_file import SourceFile
from hlat.data.stores.local_files import CHECKSUM_KEY, checksum_matches, with_checksum
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.terminal import listed

FORMAT_VERSION = 4  # version of the records
WORK_VERSION = 3  # format version of unfinished work, and of partitions of a corpus
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
QUARANTINE_FILE = "quarantine.jsonl"
BLOCKS_FILE = "blocks.npy"

Count = Annotated[int, Field(strict=True, ge=0, le=1 << 62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
SourceIndex = Annotated[int, Field(strict=True, ge=-1, le=1 << 31)]


def shard_file(split: Split, index: int) -> str:
    """Return the file name of a shard, which begins with its split and sorts in order."""
    return f"{split}-{index:05d}.bin"


def documents_file(split: Split) -> str:
    """Return the name of the file with the document boundaries of a split."""
    return f"{split}-documents.bin"


class StrictRecord(BaseModel):
    """Base of all records that are written next to data; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardRecord(StrictRecord):
    """A shard file: its name, its size in tokens and in bytes, its hash."""

    file: str
    tokens: Count
    bytes: Count
    sha256: Sha256


class SourceTokens(StrictRecord):
    """Documents, tokens and UTF-8 bytes of one source in a split; the tokens of a source are contiguous."""

    source: SourceIndex
    documents: Count
    tokens: Count
    text_bytes: Count


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
    """Counts of the rows of one source; each row is null, empty, unreadable, or a document."""

    source: SourceIndex  # index of the source; -1 for data.validation.path
    name: str | None  # its name in the recipe, if it has one
    rows: Count
    null_rows: Count  # rows without text, left out
    empty_documents: Count  # rows with an empty text, left out
    unreadable_rows: Count  # bad rows, left out
    documents: Count  # all other rows. A document inside which a validation tail begins is in both splits.
    copies: Count  # documents that are exact copies of earlier ones, dropped or not
    copied_tokens: Count  # tokens of these copies, end-of-sequence tokens included


class QuarantineRecord(StrictRecord):
    """The file that lists the bad rows, and their number."""

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
        if not isinstance(self.content[0], int) or self.content[0] < -1:
            raise ValueError(f"content: begins with {self.content[0]!r}, which is not the index of a source")
        return self

    @property
    def column(self) -> str:
        return str(self.content[1])

    @property
    def format(self) -> FileFormat:
        """Format of the file; DataError if this version of hlat does not know it."""
        return format_named(str(self.content[2]))

    @property
    def files(self) -> "list[SourceRecord]":
        """The file, and its companion if it has one."""
        return [self] if self.index is None else [self, self.index]

    @classmethod
    def from_file(cls, file: SourceFile) -> "SourceRecord":
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
        identity = self.bytes, self.mtime_ns, self.sha256, self.etag
        index = None if self.index is None else self.index.to_file()
        return SourceFile(self.path, self.format, self.column, int(self.content[0]), *identity, index)


class BlocksRecord(StrictRecord):
    """Blocks of text that streams read, for data that is tokenized while training (data.mode "online")."""

    file: str  # name of the block index file, an int64 array of shape (blocks, 3)
    sha256: Sha256  # hash of that file
    bytes: Count  # size of that file
    counts: list[Count]  # number of blocks of each source, in the order of the sources
    # Documents whose hash lies below this are validation documents.
    below: Annotated[int, Field(strict=True, ge=0, le=1 << 64)]


class DataManifest(StrictRecord):
    """Content of prepared data, and the settings and source files that it was made from."""

    format_version: int  # ``FORMAT_VERSION``
    fingerprint: str  # see ``content_fingerprint``
    dtype: Literal["uint16", "uint32"]  # dtype of the tokens in the shards
    vocab_size: Count  # number of token ids of the tokenizer
    eos_id: Count | None  # end-of-sequence token; None for none
    bos_id: Count | None  # begin-of-sequence token of the tokenizer, which is not in the data; None if unknown
    tokenizer_sha256: Sha256  # see ``Tokenizer.sha256``
    splits: dict[Split, SplitRecord]  # counts and files by split
    rows: list[SourceRows]  # counts of the rows by source
    quarantine: QuarantineRecord | None  # the list of bad rows; None if there are none
    notes: list[str]  # sentences for the user about this preparation
    settings: dict[str, Any]  # see ``content_settings``
    places: dict[Literal["corpus", "tokenizer"], list[str]]  # see ``recipe_locations``
    sources: list[SourceRecord]  # the source files
    blocks: BlocksRecord | None = None  # the blocks of text; None unless the text is tokenized while training

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"splits: has {sorted(self.splits)}, expected {sorted(SPLITS)}")
        if set(self.places) != {"corpus", "tokenizer"}:
            raise ValueError("places: must have exactly the keys corpus and tokenizer")
        # Only names that hlat writes, so that no file outside the folder is ever opened.
        for field, name, expected in _file_names(self):
            if name != expected:
                raise ValueError(f"{field}: file name is {name!r}, expected {expected!r}")
        return self

    @property
    def source_names(self) -> dict[int, str]:
        """Name or path of each source, by its index."""
        # As ``recipe_locations`` writes them.
        matches = (re.match(r"data\.(?:sources\.(\d+)\.)?path=(.*)", each, re.DOTALL) for each in self.places["corpus"])
        paths = {int(match[1] or 0): match[2] for match in matches if match is not None}
        return {row.source: row.name or paths.get(row.source, f"source {row.source}") for row in self.rows}

    def total(self, count: str) -> int:
        """Add up a count of ``SourceRows`` over the sources."""
        return sum(getattr(source, count) for source in self.rows)

    @property
    def copies_dropped(self) -> bool:
        return bool(self.settings.get("data.duplicates") == "drop")


def content_fingerprint(
    tokenizer_sha256: str,
    dtype: str,
    splits: dict[Split, SplitRecord],
    sources: list[SourceRecord] | None = None,
    blocks: BlocksRecord | None = None,
) -> str:
    """Compute the fingerprint of prepared data: a hash of its tokenizer and shards, or its blocks."""
    shards = [[shard.sha256 for shard in splits[split].shards] for split in SPLITS]
    content: list[Any] = [tokenizer_sha256, dtype, shards]
    # Text that is tokenized while training has no shards: the files and their blocks stand for it.
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


_MAX_PROBLEMS = 5  # problems of one record that a message lists


class UnknownFormatError(Exception):
    """A record has a format version that this version of hlat does not read; the message names both."""


def read_data_manifest(folder: Path) -> DataManifest | None:
    """Read the manifest of a folder; None if it has none; DataError if it is damaged or of another format."""
    path = folder / MANIFEST_FILE
    try:
        return DataManifest.model_validate(read_record(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        remedy = "`hlat data prepare RECIPE` makes such a folder of texts."
        raise DataError(f"{folder}: is a file, and the folder of prepared data is expected. {remedy}") from error
    except UnknownFormatError as error:
        raise DataError(
            f"{path}: {error}. Prepare the data again in another data.prepared_dir, or use the version of hlat that "
            "wrote it."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(
            f"{path}: damaged: {damage_of(error)}. Restore the file, or delete {folder} and prepare again: the same "
            "corpus and settings give the same data, and runs can resume with it."
        ) from error


def write_record(path: Path, record: StrictRecord) -> None:
    """Write a record with its checksum; OSError if the disk refuses."""
    # As JSON values, of which the checksum is computed when it is read.
    content = with_checksum(json.loads(record.model_dump_json()))
    write_atomic(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_record(path: Path) -> dict[str, Any]:
    """Read the fields of a record; OSError if it is unreadable, ValueError if damaged, or UnknownFormatError."""
    try:
        stored = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(stored, dict):
        raise ValueError(f"a JSON {type(stored).__name__}, not an object")
    version = stored.get("format_version")
    if version != FORMAT_VERSION:
        raise UnknownFormatError(f"data format {version!r}; this version reads {FORMAT_VERSION}")
    if not checksum_matches(stored):
        raise ValueError("its content does not match the checksum in it")
    return {key: value for key, value in stored.items() if key != CHECKSUM_KEY}


def damage_of(error: Exception) -> str:
    """Describe the problems of a record, whose reading raised an error, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": ") for item in error.errors()]
    return listed(problems, _MAX_PROBLEMS, "; ")
