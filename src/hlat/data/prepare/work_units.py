"""The unit of work and of restart: a run of documents -> a file of tokens per split, and an index written last.

A unit exists once its index does; killed before, it is done again. Token files go away when a finished shard holds
their tokens; the index stays until the preparation is complete, so that a restart knows what was there. It holds 40
bytes a document: the hash by which copies are known, and where its tokens are, so that a copy can still be left out.
Worker processes run this module, so it brings neither torch nor the heavier rooms along.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.data.formats import Content, ContentT, text_byte_count, tokenize_contents, tokens_from_bytes
from hlat.data.manifest import CHECKSUM_KEY, BadRow, checksum_matches, with_checksum
from hlat.data.prepare.duplicates import Hashes, hash_documents
from hlat.data.sources import SPLITS, Split, SplitRule
from hlat.data.stores import write_atomic
from hlat.data.tokenizers import TokenIdArray, Tokenizer
from hlat.runtime import DataError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CorpusPosition:
    """A place in the corpus: the index of a file and of a row in it."""

    file: int = 0
    row: int = 0


@dataclass(frozen=True)
class UnitSpan:
    """Which documents a unit holds, and what was met on the way.

    Attributes:
        number: index of the unit in the corpus, or in the part of it that one machine prepares.
        next: where the following unit begins.
        last: whether the corpus, or the part, ends with this unit.
        source: index of the source that all its documents belong to.
        characters: of its documents, or tokens where they are that, null and empty ones counting nothing.
        rows: rows read, whatever was in them.
        null_rows, empty_documents: left out, and counted.
        unreadable: left out, and listed.
        position: bytes of the corpus' files read when its last document had been read.
    """

    number: int
    next: CorpusPosition
    last: bool
    source: int
    characters: int
    rows: int
    null_rows: int
    empty_documents: int
    unreadable: list[BadRow]
    position: int

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return {**vars(self), "next": vars(self.next)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "UnitSpan":
        """The span that ``to_json`` wrote."""
        unreadable = [BadRow(*row) for row in stored["unreadable"]]
        return cls(**{**stored, "next": CorpusPosition(**stored["next"]), "unreadable": unreadable})


@dataclass(frozen=True)
class WorkUnit:
    """A unit to be tokenized.

    Attributes:
        span: what is in it.
        assignment: how its documents are split.
        documents: as ``as_bytes`` gives them.
        are_tokens: whether they are tokens already, and not text.
        where: where they are from.
    """

    span: UnitSpan
    assignment: SplitRule
    documents: list[bytes]
    are_tokens: bool
    where: str


@dataclass(frozen=True)
class SplitIndex:
    """What a unit put into one split, by pieces: documents, or parts of one inside which a validation tail begins.

    Attributes:
        documents: which document of the unit each piece is of, int64, shape (pieces,).
        lengths: its tokens, its end token included, int64, shape (pieces,).
        text_bytes: bytes of text in UTF-8 that it is, or that its tokens stand for, int64, shape (pieces,).
        sha256: of the file of their tokens; empty where there are no pieces and so no file.
    """

    documents: Int64s
    lengths: Int64s
    text_bytes: Int64s
    sha256: str


@dataclass(frozen=True)
class UnitIndex:
    """A finished unit, and the hash of each of its documents."""

    span: UnitSpan
    hashes: Hashes
    splits: dict[Split, SplitIndex]


def write_tokenized_unit(unit: WorkUnit, tokenizer: Tokenizer, folder: Path, dtype: str) -> None:
    """Tokenize a unit, unless its documents are tokens, and write its files, the index last.

    Raises:
        OSError: the disk refused; the unit does not exist then.
        DataError: a text that the tokenizer cannot encode.
    """
    dealt = _pieces_by_split(unit, tokens_from_bytes) if unit.are_tokens else _pieces_by_split(unit, bytes.decode)
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    splits: dict[Split, dict[str, str]] = {}
    for split in SPLITS:
        pieces = [part for _, part in dealt[split]]
        tokens = tokenize_contents(pieces, tokenizer)
        sha256 = ""
        if tokens:
            content = _concatenate(tokens, ends, dtype).data
            sha256 = hashlib.sha256(content).hexdigest()
            write_atomic(tokens_file(folder, unit.span.number, split), content)
        splits[split] = {
            "documents": _encode_int64s([document for document, _ in dealt[split]]),
            "lengths": _encode_int64s([len(ids) + len(ends) for ids in tokens]),
            "text_bytes": _encode_int64s([text_byte_count(part, tokenizer) for part in pieces]),
            "sha256": sha256,
        }
    hashes = base64.b64encode(hash_documents(unit.documents, unit.are_tokens).tobytes()).decode()
    index = with_checksum({"span": unit.span.to_json(), "hashes": hashes, "splits": splits})
    write_atomic(index_file(folder, unit.span.number), json.dumps(index).encode())


def _pieces_by_split(unit: WorkUnit, decoded: Callable[[bytes], ContentT]) -> dict[Split, list[tuple[int, Content]]]:
    """The pieces of each split, and which document of the unit each is of."""
    dealt: dict[Split, list[tuple[int, Content]]] = {split: [] for split in SPLITS}
    offset = 0
    for document, encoded in enumerate(unit.documents):
        content = decoded(encoded)
        for split, part in unit.assignment.split_document(content, encoded, offset):
            dealt[split].append((document, part))
        offset += len(content)
    return dealt


def read_index(folder: Path, number: int) -> UnitIndex | None:
    """The index of a unit, None if the unit is not finished. Earlier versions wrote it without a checksum.

    Raises:
        DataError: it is damaged.
    """
    file = index_file(folder, number)
    try:
        stored = json.loads(file.read_bytes())
        if CHECKSUM_KEY in stored and not checksum_matches(stored):
            raise ValueError("its content does not match the checksum in it")
        splits = {split: _decode_split_index(stored["splits"][split]) for split in SPLITS}
        hashes = np.frombuffer(base64.b64decode(stored["hashes"]), dtype="<u8").reshape(-1, 2)
        return UnitIndex(UnitSpan.from_json(stored["span"]), hashes, splits)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file}: unfinished preparation is damaged: {error}. Delete {folder.parent} and run its hlat data prepare "
            "again."
        ) from error


def tokens_file(folder: Path, number: int, split: Split) -> Path:
    """Where the tokens of a unit are; a split without documents has no such file."""
    return folder / f"{number:08d}.{split}"


def index_file(folder: Path, number: int) -> Path:
    """Where the index of a unit is."""
    return folder / f"{number:08d}.json"


def _concatenate(documents: list[TokenIdArray], ends: list[int], dtype: str) -> npt.NDArray[np.unsignedinteger]:
    end = np.array(ends, dtype=np.uint32)
    little = np.dtype(dtype).newbyteorder("<")
    return np.concatenate([part for ids in documents for part in (ids, end)]).astype(little)


def _encode_int64s(numbers: list[int]) -> str:
    return base64.b64encode(np.array(numbers, dtype="<i8").tobytes()).decode()


def _decode_split_index(stored: dict[str, str]) -> SplitIndex:
    documents, lengths, text_bytes = (
        np.frombuffer(base64.b64decode(stored[name]), dtype="<i8") for name in ("documents", "lengths", "text_bytes")
    )
    return SplitIndex(documents, lengths, text_bytes, stored["sha256"])
