"""Work units, the unit of work and of restart: consecutive documents -> one file of tokens per split, and an index.

    documents --write_tokenized_unit--> tokens of each split, then the index (hash and position of each document)
    hashes of a unit's documents --present in the hashes seen?--> duplicates
                                 --the others, sorted---------->  a new sorted run of hashes seen

The index is written last: a unit is finished when its index exists, otherwise it is done again. Token files are deleted
once a finished shard holds their tokens; indexes stay until the preparation is complete, so that a restart knows
which units were finished. An index holds 40 bytes per document: the 128-bit hash that identifies duplicates, and the
position of its tokens, so that a duplicate can be left out later.

Duplicates are found in the order of the corpus, exact up to hashes: two different texts are taken for the same with a
probability of n * n / 2**129 in a corpus of n documents, 10**-19 for ten billion. Memory is 16 bytes per distinct
document, and about 1 GB more while runs are merged.

Worker processes import this module, so it must not import torch or the heavier rooms.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.data.documents import (
    SPLITS,
    BadRow,
    Content,
    ContentT,
    Split,
    SplitRule,
    text_byte_count,
    tokenize_contents,
    tokens_from_bytes,
)
from hlat.data.stores.local_files import checksum_matches, with_checksum
from hlat.data.tokenizers.base import Tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import write_atomic

Hashes = npt.NDArray[np.bytes_]  # 128 bits of each document, shape (documents,)
_HASH = np.dtype("S16")  # equal only if all 16 bytes are: zero bytes at the end count for nothing, in all hashes alike
Bools = npt.NDArray[np.bool_]

# Largest number of hashes in a merged run: a merge needs memory for its result in addition to its inputs.
LARGEST_RUN = 1 << 26


def hash_documents(documents: Sequence[bytes], are_tokens: bool = False) -> Hashes:
    """Return the 128-bit hash of each document, shape (documents,); text and tokens never share a hash."""
    person = b"tokens" if are_tokens else b""
    digests = b"".join(hashlib.blake2b(document, digest_size=16, person=person).digest() for document in documents)
    return np.frombuffer(digests, dtype=_HASH)


class DuplicateFinder:
    """Finds duplicates among all documents added so far, from a few sorted runs of their hashes."""

    def __init__(self, largest: int = LARGEST_RUN) -> None:
        self._largest = largest
        self._runs: list[Hashes] = []  # each sorted

    def add(self, hashes: Hashes) -> Bools:
        """Return a mask of the duplicates of earlier documents, shape (n,); add in corpus order."""
        order = np.argsort(hashes, kind="stable")  # of equal hashes the first stays first
        ordered = hashes[order]
        known = np.zeros(len(order), dtype=np.bool_)
        known[1:] = ordered[1:] == ordered[:-1]
        for run in self._runs:
            known |= run[np.minimum(np.searchsorted(run, ordered), len(run) - 1)] == ordered
        if not known.all():
            self._runs.append(ordered[~known])
            self._merge_runs()
        duplicates = np.empty_like(known)
        duplicates[order] = known
        return duplicates

    def _merge_runs(self) -> None:
        while len(self._runs) > 1:
            # Runs of similar size are merged, so that runs are few and each hash is merged rarely.
            older, newer = self._runs[-2:]
            if len(older) > 2 * len(newer) or len(older) + len(newer) > self._largest:
                return
            self._runs[-2:] = [np.insert(older, np.searchsorted(older, newer), newer)]


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CorpusPosition:
    """A position in the corpus: the index of a file and of a row in it."""

    file: int = 0
    row: int = 0


@dataclass
class UnitSpan:
    """The documents of a unit, and counts of the rows read to get them; it grows while rows are taken."""

    number: int  # index of the unit in the corpus, or in its partition
    next: CorpusPosition  # position at which the following unit begins
    last: bool = False  # True for the last unit of the corpus or partition
    source: int = 0  # index of the source of all its documents
    characters: int = 0  # characters (or tokens) of its documents
    rows: int = 0  # rows read, of any content
    null_rows: int = 0  # rows without text, left out
    empty_documents: int = 0  # empty documents, left out
    unreadable: list[BadRow] = field(default_factory=list)  # bad rows, left out and listed
    position: int = 0  # bytes of the corpus' files up to the end of its last document

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "UnitSpan":
        unreadable = [BadRow(*row) for row in stored["unreadable"]]
        return cls(**{**stored, "next": CorpusPosition(**stored["next"]), "unreadable": unreadable})


@dataclass(frozen=True)
class WorkUnit:
    """A unit that is to be tokenized."""

    span: UnitSpan  # description of its documents
    split_rule: SplitRule  # rule that splits its documents
    documents: list[bytes]  # content as bytes, see ``content_bytes``
    are_tokens: bool  # True if the documents are token ids, False if they are text
    where: str  # file and row of its beginning, for messages


@dataclass(frozen=True)
class SplitIndex:
    """The pieces of one unit in one split: documents, or parts of one on one side of a tail boundary."""

    documents: Int64s  # index in the unit of each piece's document, int64, shape (pieces,)
    lengths: Int64s  # tokens of each piece, its end token included, int64, shape (pieces,)
    text_bytes: Int64s  # bytes of UTF-8 text that each piece stands for, int64, shape (pieces,)
    sha256: str  # checksum of the token file; empty if there are no pieces and so no file


@dataclass(frozen=True)
class UnitIndex:
    """The index of a finished unit, as its JSON file holds it."""

    span: UnitSpan
    hashes: Hashes
    splits: dict[Split, SplitIndex]


def write_tokenized_unit(unit: WorkUnit, tokenizer: Tokenizer, folder: Path, dtype: str) -> None:
    """Tokenize a unit and write its files; OSError of the disk, DataError of the tokenizer."""
    by_split = _pieces_by_split(unit, tokens_from_bytes) if unit.are_tokens else _pieces_by_split(unit, bytes.decode)
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    splits: dict[Split, dict[str, str]] = {}
    for split in SPLITS:
        pieces = [piece for _, piece in by_split[split]]
        tokens = tokenize_contents(pieces, tokenizer)
        sha256 = ""
        if tokens:
            end, little = np.array(ends, dtype=np.uint32), np.dtype(dtype).newbyteorder("<")
            content = np.concatenate([piece for ids in tokens for piece in (ids, end)]).astype(little).data
            sha256 = hashlib.sha256(content).hexdigest()
            write_atomic(tokens_file(folder, unit.span.number, split), content)
        splits[split] = {
            "documents": _encode_int64s([document for document, _ in by_split[split]]),
            "lengths": _encode_int64s([len(ids) + len(ends) for ids in tokens]),
            "text_bytes": _encode_int64s([text_byte_count(piece, tokenizer) for piece in pieces]),
            "sha256": sha256,
        }
    hashes = base64.b64encode(hash_documents(unit.documents, unit.are_tokens).tobytes()).decode()
    index = with_checksum({"span": asdict(unit.span), "hashes": hashes, "splits": splits})
    # The index last: it makes the unit finished.
    write_atomic(index_file(folder, unit.span.number), json.dumps(index).encode())


def _pieces_by_split(unit: WorkUnit, decode: Callable[[bytes], ContentT]) -> dict[Split, list[tuple[int, Content]]]:
    """Return the pieces of each split, as (index of the document in the unit, content)."""
    pieces: dict[Split, list[tuple[int, Content]]] = {split: [] for split in SPLITS}
    offset = 0
    for document, document_bytes in enumerate(unit.documents):
        content = decode(document_bytes)
        for split, piece in unit.split_rule.split_document(content, document_bytes, offset):
            pieces[split].append((document, piece))
        offset += len(content)
    return pieces


def read_index(folder: Path, number: int) -> UnitIndex | None:
    """Read the index of a unit; None if the unit is not finished; DataError if it is damaged."""
    file = index_file(folder, number)
    try:
        stored = json.loads(file.read_bytes())
        if not checksum_matches(stored):
            raise ValueError("its content does not match the checksum in it")
        splits = {split: _decode_split_index(stored["splits"][split]) for split in SPLITS}
        hashes = np.frombuffer(base64.b64decode(stored["hashes"]), dtype=_HASH)
        return UnitIndex(UnitSpan.from_json(stored["span"]), hashes, splits)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file}: unfinished preparation is damaged: {error}. Delete {folder.parent} and run hlat data "
            "prepare again."
        ) from error


def tokens_file(folder: Path, number: int, split: Split) -> Path:
    """Return the path of a unit's tokens of one split; a split without documents has no such file."""
    return folder / f"{number:08d}.{split}"


def index_file(folder: Path, number: int) -> Path:
    """Return the path of the file whose existence makes a unit finished."""
    return folder / f"{number:08d}.json"


def _encode_int64s(numbers: list[int]) -> str:
    return base64.b64encode(np.array(numbers, dtype="<i8").tobytes()).decode()


def _decode_split_index(stored: dict[str, str]) -> SplitIndex:
    documents, lengths, text_bytes = (
        np.frombuffer(base64.b64decode(stored[name]), dtype="<i8") for name in ("documents", "lengths", "text_bytes")
    )
    return SplitIndex(documents, lengths, text_bytes, stored["sha256"])
