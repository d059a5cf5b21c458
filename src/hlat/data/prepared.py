"""A folder of prepared data: its manifest, opened, checked cheaply on opening and completely on request.

manifest.json             written last: without it the folder is not prepared data
tokenizer/                as transformers.AutoTokenizer reads it
train-00000.bin ...       tokens, raw little-endian
train-documents.bin       where each document begins, uint64, and where the last one ends
validation-...            the same
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from hlat.config import DataConfig
from hlat.data.settings import differences, places_of, settings_of
from hlat.data.shards import TokenArray
from hlat.data.split import SPLITS, Split
from hlat.data.tokenizer import Tokenizer, load_saved, load_tokenizer
from hlat.runtime import DataError

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"

_CHANGED = "the checksum differs from the manifest's: restore the file, or prepare again"
_CHECK = 1 << 22  # tokens looked at together


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardRecord(_Record):
    """One shard file."""

    file: str
    tokens: int
    bytes: int
    sha256: str


class SourceTokens(_Record):
    """What a split holds of one source: a stretch of its tokens, the sources one after the other."""

    source: int
    documents: int
    tokens: int


class SplitRecord(_Record):
    """One split: what it holds and in which files. ``text_bytes`` is UTF-8."""

    documents: int
    tokens: int
    text_bytes: int
    sources: list[SourceTokens]
    shards: list[ShardRecord]
    documents_file: str
    documents_sha256: str


class SourceRecord(_Record):
    """One file that the data was made from."""

    path: str
    use: Literal["split", "validation"]
    content: list[str | int]
    bytes: int
    mtime_ns: int
    sha256: str
    etag: str = ""


class BlocksRecord(_Record):
    """Where text is tokenized while training: the blocks that are dealt to streams.

    Attributes:
        file, sha256: the catalogue, int64 (blocks, 3).
        counts: how many of its blocks are each source's, in the order of the sources.
        below: documents whose hash lies below this are validation text.
    """

    file: str
    sha256: str
    counts: list[int]
    below: int


class Manifest(_Record):
    """What prepared data is and what it was made from."""

    format_version: int
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    tokenizer_sha256: str
    splits: dict[Split, SplitRecord]
    null_rows: int
    empty_documents: int
    notes: list[str]
    settings: dict[str, Any]
    places: dict[Literal["corpus", "tokenizer"], list[str]]
    sources: list[SourceRecord]
    blocks: BlocksRecord | None = None


@dataclass(frozen=True)
class Prepared:
    """Prepared data, opened.

    Attributes:
        dir: the folder.
        manifest: what it says of itself.
        tokenizer: the tokenizer that made it.
    """

    dir: Path
    manifest: Manifest
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of the content, tokens and tokenizer, wherever it lies and whatever it was made from."""
        return self.manifest.fingerprint

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.dir / TOKENIZER

    @property
    def notes(self) -> list[str]:
        """What the user should know about this preparation, one sentence each."""
        return self.manifest.notes

    @property
    def train_tokens(self) -> int:
        """Tokens of the training split."""
        return self.manifest.splits["train"].tokens

    @property
    def validation_tokens(self) -> int:
        """Tokens of the validation split, 0 if there is none."""
        return self.manifest.splits["validation"].tokens

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text that each token id stands for, shape (vocab_size,); see Tokenizer.token_bytes."""
        return self.tokenizer.token_bytes

    def tokens(self, split: Split) -> TokenArray:
        """The tokens of a split, memory-mapped."""
        shards = self.manifest.splits[split].shards
        return TokenArray([self.dir / s.file for s in shards], [s.tokens for s in shards], self.manifest.dtype)

    def documents(self, split: Split) -> npt.NDArray[np.uint64]:
        """Where each document of a split begins, in tokens, and where the last one ends: shape (documents + 1,)."""
        record = self.manifest.splits[split]
        return np.memmap(self.dir / record.documents_file, dtype="<u8", mode="r", shape=(record.documents + 1,))


def content_fingerprint(
    tokenizer_sha256: str,
    dtype: str,
    splits: dict[Split, SplitRecord],
    sources: list[SourceRecord] | None = None,
    blocks: BlocksRecord | None = None,
) -> str:
    """The fingerprint of prepared data: its tokens, shard by shard, and the tokenizer; online, the files and blocks."""
    content: list[Any] = [
        tokenizer_sha256,
        dtype,
        [[shard.sha256 for shard in splits[split].shards] for split in SPLITS],
    ]
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


def open_prepared(dir: str | Path, config: DataConfig | None = None) -> Prepared:
    """Open prepared data; sizes of all files are checked against the manifest, contents are not (see verify).

    Args:
        dir: the folder.
        config: if given, the settings that decide the content must be the ones the data was prepared with.

    Raises:
        DataError: not prepared data, incomplete, damaged, or prepared with other settings.
    """
    folder = Path(dir).expanduser()
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data here (no {MANIFEST}). Run hlat data prepare first.")
    for path, size in _sizes(folder, manifest):
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise DataError(
                f"{path}: {found}, should have {size} bytes. Restore it, or delete {folder} and prepare again."
            )
    tokenizer = load_saved(folder / TOKENIZER)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that made this data. Restore it, or prepare again.")
    if config is not None:
        refuse_other_settings(folder, manifest, config)
    return Prepared(folder, manifest, tokenizer)


def refuse_other_settings(folder: Path, manifest: Manifest, config: DataConfig, more: list[str] | None = None) -> None:
    """Raise DataError if data was prepared with other settings than these, or for the reasons in ``more``."""
    found = differences(manifest.settings, settings_beside(folder, manifest, config)) + (more or [])
    if found:
        listed = "".join(f"\n  {reason}" for reason in found)
        raise DataError(
            f"{folder}: holds data prepared otherwise:{listed}\nGive another folder with data.prepared_dir, or delete "
            "this one to prepare anew, or go back to what it was prepared with."
        )


def settings_beside(folder: Path, manifest: Manifest | None, config: DataConfig) -> dict[str, Any]:
    """``settings_of``, where finished data in the folder holds a copy of a given tokenizer that has gone since.

    Raises:
        DataError: a tokenizer that is not there, and that is not the one the data was prepared with.
    """
    path = config.tokenizer.path
    if manifest is None or path is None or Path(path).expanduser().exists():
        return settings_of(config)
    then = manifest.places["tokenizer"]
    if then != places_of(config)["tokenizer"]:
        raise DataError(
            f"data.tokenizer.path {path}: no such tokenizer. {folder} holds data that was prepared with "
            f"{' '.join(then) or 'a tokenizer trained on its corpus'}. Ask for that to use it, or correct the path."
        )
    return settings_of(config, manifest.tokenizer_sha256)


def check_tokenizer(config: DataConfig, vocab_size: int) -> None:
    """``check_vocabulary`` before anything is prepared, where the recipe names a tokenizer that is there.

    One that is not there is left to ``prepare``, which knows whether finished data stands in for it.

    Raises:
        DataError: the tokenizer is unreadable, or has more tokens than the model has embedding rows.
    """
    path = config.tokenizer.path
    if path is None or not Path(path).expanduser().exists():
        return
    needed = load_tokenizer(path, config.tokenizer.eos_token).vocab_size
    if needed > vocab_size:
        raise DataError(
            f"data.tokenizer.path {path}: the tokenizer has {needed} tokens, the model only {vocab_size} "
            f"(model.vocab_size). Set model.vocab_size to at least {needed}, or give a smaller tokenizer."
        )


def check_vocabulary(prepared: Prepared, vocab_size: int) -> None:
    """Raise DataError if the data has token ids that a model with so many embedding rows does not."""
    needed = prepared.manifest.vocab_size
    if needed > vocab_size:
        raise DataError(
            f"{prepared.dir}: the tokenizer has {needed} tokens, the model only {vocab_size} (model.vocab_size). "
            f"Set model.vocab_size to at least {needed}, or prepare the data with a smaller tokenizer."
        )


def verify(dir: str | Path) -> Prepared:
    """Open prepared data and check all of its content: checksums, token range, document boundaries.

    Raises:
        DataError: every problem found, one a line.
    """
    prepared = open_prepared(dir)
    problems = list(_problems(prepared))
    if problems:
        raise DataError(f"{prepared.dir}: damaged:" + "".join(f"\n  {problem}" for problem in problems))
    return prepared


def _problems(prepared: Prepared) -> Iterator[str]:
    manifest = prepared.manifest
    stated = (manifest.tokenizer_sha256, manifest.dtype, manifest.splits, manifest.sources, manifest.blocks)
    if content_fingerprint(*stated) != manifest.fingerprint:
        yield f"{MANIFEST}: the fingerprint does not belong to the shards it lists"
    if manifest.blocks is not None and _sha256(prepared.dir / manifest.blocks.file) != manifest.blocks.sha256:
        yield f"{manifest.blocks.file}: {_CHANGED}"
    for split, record in manifest.splits.items():
        for shard in record.shards:
            if _sha256(prepared.dir / shard.file) != shard.sha256:
                yield f"{shard.file}: {_CHANGED}"
        if _sha256(prepared.dir / record.documents_file) != record.documents_sha256:
            yield f"{record.documents_file}: {_CHANGED}"
        highest = _highest_token(prepared.tokens(split))
        if highest >= manifest.vocab_size:
            yield f"{split}: token {highest} is outside the vocabulary of {manifest.vocab_size}"
        starts = prepared.documents(split)
        if starts[0] != 0 or starts[-1] != record.tokens or bool((starts[1:] < starts[:-1]).any()):
            yield f"{record.documents_file}: not the boundaries of {record.tokens} tokens"


def _highest_token(tokens: TokenArray) -> int:
    spans = range(0, len(tokens), _CHECK)
    return max((int(tokens.read(start, min(start + _CHECK, len(tokens))).max()) for start in spans), default=-1)


def _sizes(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, int]]:
    for record in manifest.splits.values():
        yield folder / record.documents_file, 8 * (record.documents + 1)
        for shard in record.shards:
            yield folder / shard.file, shard.bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
