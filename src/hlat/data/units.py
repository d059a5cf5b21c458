"""The unit of work and of restart: a run of documents -> a file of tokens per split, and an index written last.

A unit exists once its index does; killed before, it is done again. Token files go away when a finished shard holds
their tokens; the small index stays until the preparation is complete, so that a restart knows what was there.
Worker processes run this module, so it brings neither torch nor the heavier rooms along.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hlat.data.split import SPLITS, Assignment, Split
from hlat.data.storage import write_whole
from hlat.data.tokenizer import Ids, Tokenizer


@dataclass(frozen=True)
class Cursor:
    """A place in the corpus: the index of a file and of a row in it."""

    file: int = 0
    row: int = 0


@dataclass(frozen=True)
class Span:
    """Which documents a unit holds, and what was met on the way.

    Attributes:
        number: index of the unit in the corpus.
        next: where the following unit begins.
        last: whether the corpus ends with this unit.
        source: index of the source that all its documents belong to.
        characters: of its documents, null and empty ones counting nothing.
        null_rows, empty_documents: left out, and counted.
        position: bytes of the corpus' files read when its last document had been read.
    """

    number: int
    next: Cursor
    last: bool
    source: int
    characters: int
    null_rows: int
    empty_documents: int
    position: int


@dataclass(frozen=True)
class Unit:
    """A unit to be tokenized: its documents in UTF-8, how they are split, and where they are from."""

    span: Span
    assignment: Assignment
    texts: list[bytes]
    where: str


@dataclass(frozen=True)
class SplitIndex:
    """What a unit put into one split: bytes of text, and tokens of each document, its end token included."""

    text_bytes: int
    lengths: list[int]


@dataclass(frozen=True)
class UnitIndex:
    """A finished unit."""

    span: Span
    splits: dict[Split, SplitIndex]


def encode_unit(unit: Unit, tokenizer: Tokenizer, folder: Path, dtype: str) -> None:
    """Tokenize a unit and write its files, the index last.

    Raises:
        OSError: the disk refused; the unit does not exist then.
        DataError: a text that the tokenizer cannot encode.
    """
    texts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    offset = 0
    for encoded in unit.texts:
        text = encoded.decode()
        for split, part in unit.assignment.pieces(text, encoded, offset):
            texts[split].append(part)
        offset += len(text)
    splits: dict[Split, SplitIndex] = {}
    for split in SPLITS:
        documents = tokenizer.encode_documents(texts[split])
        ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        lengths = [len(ids) + len(ends) for ids in documents]
        if documents:
            write_whole(tokens_file(folder, unit.span.number, split), _joined(documents, ends, dtype).data)
        splits[split] = SplitIndex(sum(len(text.encode()) for text in texts[split]), lengths)
    index = {"span": asdict(unit.span), "splits": {split: asdict(part) for split, part in splits.items()}}
    write_whole(index_file(folder, unit.span.number), json.dumps(index).encode())


def read_index(folder: Path, number: int) -> UnitIndex | None:
    """The index of a unit, None if the unit is not finished."""
    try:
        stored = json.loads(index_file(folder, number).read_bytes())
    except FileNotFoundError:
        return None
    span = Span(**{**stored["span"], "next": Cursor(**stored["span"]["next"])})
    return UnitIndex(span, {split: SplitIndex(**stored["splits"][split]) for split in SPLITS})


def tokens_file(folder: Path, number: int, split: Split) -> Path:
    """Where the tokens of a unit are; a split without documents has no such file."""
    return folder / f"{number:08d}.{split}"


def index_file(folder: Path, number: int) -> Path:
    """Where the index of a unit is."""
    return folder / f"{number:08d}.json"


def _joined(documents: list[Ids], ends: list[int], dtype: str) -> npt.NDArray[np.unsignedinteger]:
    end = np.array(ends, dtype=np.uint32)
    little = np.dtype(dtype).newbyteorder("<")
    return np.concatenate([part for ids in documents for part in (ids, end)]).astype(little)
