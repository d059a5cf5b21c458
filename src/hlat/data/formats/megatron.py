"""Megatron-LM's indexed datasets, read: a .bin of tokens and the .idx that says where its documents are.

name.idx, little-endian throughout:
    9 bytes   "MMIDIDX", two zero bytes
    uint64    version, 1
    uint8     type of the tokens in the .bin: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 and 7 floats, 8 uint16
    uint64    sequences
    uint64    entries of the last table: documents + 1
    int32     of each sequence: how many tokens it has
    int64     of each sequence: at which byte of the .bin it begins
    int64     of each document: its first sequence; and last of all the number of sequences
    int8      of each sequence: its modality; only in multimodal datasets, which are not read
name.bin: the tokens of all sequences.

The format is that of megatron/core/datasets/indexed_dataset.py and megatron/core/datasets/readme.md in
https://github.com/NVIDIA/Megatron-LM, from MMapIndexedDataset (2019) on; GPT-NeoX and NeMo write the same.
"""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.runtime import DataError

StoredTokens = npt.NDArray[np.integer[Any]]

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6, 7}
_AGAIN = "Write it again with Megatron's tools/preprocess_data.py, or fetch both files again."
_CHECKED = 1 << 20  # entries of a table looked at together: an index may be larger than memory


def index_path(data: str) -> str:
    """The name of the .idx that belongs to a .bin, paths and URLs alike."""
    return data.removesuffix(".bin") + ".idx"


class MegatronDataset:
    """The documents of one dataset, memory-mapped, checked completely but for the tokens themselves when opened.

    Args:
        data: the .bin.
        index: the .idx; None for the one beside it.

    Attributes:
        documents: how many there are.
        sequences: how many there are; a document has one or several, or none.
        tokens: of all documents.
        dtype: of the tokens, a little-endian integer.

    Raises:
        DataError: a file that is missing, unreadable, truncated or damaged, or two that do not belong together.
    """

    def __init__(self, data: Path, index: Path | None = None) -> None:
        self._data, self._index = data, index or Path(index_path(str(data)))
        bytes_of_index, self._bytes = _size(self._index), _size(data)
        code, self.sequences, entries = self._header(bytes_of_index)
        self.dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        at = _HEADER.size
        self._lengths = self._table("<i4", at, self.sequences)
        at += self._lengths.nbytes
        self._begins = self._table("<i8", at, self.sequences)
        at += self._begins.nbytes
        self._firsts = self._table("<i8", at, entries)
        self.documents = entries - 1
        self._check_documents()
        self.tokens = self._check_sequences()
        self._mapped: StoredTokens = _map(data, self.dtype.str, 0, self._bytes // self.dtype.itemsize)

    def __len__(self) -> int:
        return self.documents

    def document(self, number: int) -> StoredTokens:
        """The tokens of a document, shape (tokens,), read-only; not copied where its sequences follow one another."""
        first, end = int(self._firsts[number]), int(self._firsts[number + 1])
        parts = [self._sequence(sequence) for sequence in range(first, end)]
        begins, lengths = self._begins[first:end], self._lengths[first:end].astype(np.int64)
        if parts and bool(np.all(begins[:-1] + lengths[:-1] * self.dtype.itemsize == begins[1:])):
            start = int(begins[0]) // self.dtype.itemsize
            return self._mapped[start : start + int(lengths.sum())]
        joined = np.concatenate([np.empty(0, self.dtype), *parts])
        joined.flags.writeable = False
        return joined

    def document_lengths(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """Tokens of each document from ``start`` on, shape (documents,)."""
        firsts = self._firsts[start : (self.documents if end is None else end) + 1]
        totals = np.concatenate([[0], np.cumsum(self._lengths[firsts[0] : firsts[-1]], dtype=np.int64)])
        return np.asarray(np.diff(totals[firsts - firsts[0]]), dtype=np.int64)

    def _sequence(self, number: int) -> StoredTokens:
        start = int(self._begins[number]) // self.dtype.itemsize
        return self._mapped[start : start + int(self._lengths[number])]

    # --- checks ----------------------------------------------------------------------------------------------------

    def _header(self, size: int) -> tuple[int, int, int]:
        """Type code, sequences, and entries of the table of documents; raises DataError unless the size agrees."""
        with _reading(self._index).open("rb") as file:
            head = file.read(_HEADER.size)
        if head.startswith(_OLD_MAGIC):
            raise DataError(
                f"{self._index}: an index of the older kind (TNTIDX, --dataset-impl lazy or cached), which is not "
                "read. Write the dataset again with --dataset-impl mmap."
            )
        if not head.startswith(_MAGIC[: len(head)]) or not head:
            raise DataError(
                f"{self._index}: not an index of Megatron-LM: it begins with {head[:9]!r}, not {_MAGIC!r}. {_AGAIN}"
            )
        if len(head) < _HEADER.size:
            raise DataError(f"{self._index}: truncated within its header, after {size} bytes. {_AGAIN}")
        _, version, code, sequences, entries = _HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{self._index}: version {version} of the format at byte 9; version 1 is read. {_AGAIN}")
        self._check_type(code)
        self._check_size(size, sequences, entries)
        return code, sequences, entries

    def _check_type(self, code: int) -> None:
        if code in _FLOATS:
            raise DataError(f"{self._index}: holds floating-point numbers (type code {code} at byte 17), not tokens.")
        if code not in _DTYPES:
            known = ", ".join(f"{known} {name}" for known, name in _DTYPES.items())
            raise DataError(f"{self._index}: unknown type code {code} at byte 17; known are {known}. {_AGAIN}")

    def _check_size(self, size: int, sequences: int, entries: int) -> None:
        if entries < 1:
            raise DataError(f"{self._index}: its table of documents has no entry (byte 26), not even the end. {_AGAIN}")
        wanted = _HEADER.size + 12 * sequences + 8 * entries
        if size == wanted + sequences and sequences:
            raise DataError(
                f"{self._index}: a multimodal dataset: each sequence has a modality, and only text is read."
            )
        if size != wanted:
            how = "truncated" if size < wanted else "longer than it says"
            raise DataError(
                f"{self._index}: {how}: {size:,} bytes, where {sequences:,} sequences and {entries - 1:,} documents "
                f"take {wanted:,}. {_AGAIN}"
            )

    def _check_documents(self) -> None:
        for start in range(0, len(self._firsts), _CHECKED):
            part = self._firsts[start : start + _CHECKED + 1]
            if (wrong := np.flatnonzero(part[1:] < part[:-1])).size:
                number = start + int(wrong[0])
                raise DataError(
                    f"{self._index}, document {number}: begins at sequence {self._firsts[number]} and ends at "
                    f"{self._firsts[number + 1]}, before it begins. {_AGAIN}"
                )
        if self._firsts[0] != 0 or self._firsts[-1] != self.sequences:
            raise DataError(
                f"{self._index}: its documents have sequences {self._firsts[0]} to {self._firsts[-1]}, and the dataset "
                f"has 0 to {self.sequences}. {_AGAIN}"
            )

    def _check_sequences(self) -> int:
        """Raise DataError unless every sequence lies within the .bin; returns how many tokens they have."""
        total = end = 0
        for start in range(0, self.sequences, _CHECKED):
            lengths = self._lengths[start : start + _CHECKED].astype(np.int64)
            begins = self._begins[start : start + _CHECKED]
            ends = begins + lengths * self.dtype.itemsize
            wrong = (lengths < 0) | (begins < 0) | (begins % self.dtype.itemsize != 0) | (begins > 1 << 62)
            if (at := np.flatnonzero(wrong)).size:
                raise self._misplaced(start + int(at[0]))
            if (at := np.flatnonzero(ends > self._bytes)).size:
                raise self._cut_off(start + int(at[0]))
            total, end = total + int(lengths.sum()), max(end, int(ends.max(initial=0)))
        if end != self._bytes:
            raise DataError(
                f"{self._data}: {self._bytes:,} bytes, and {self._index} describes the first {end:,} only: they do not "
                f"belong together. {_AGAIN}"
            )
        return total

    def _misplaced(self, number: int) -> DataError:
        return DataError(
            f"{self._index}, sequence {number}: {self._lengths[number]} tokens at byte {self._begins[number]}, which "
            f"is no place in {self._data}, {self._bytes:,} bytes of {self.dtype.name}. {_AGAIN}"
        )

    def _cut_off(self, number: int) -> DataError:
        end = int(self._begins[number]) + int(self._lengths[number]) * self.dtype.itemsize
        return DataError(
            f"{self._data}: truncated: {self._bytes:,} bytes, and sequence {number} of {self._index} goes on to byte "
            f"{end:,}. {_AGAIN}"
        )

    def _table(self, dtype: str, at: int, count: int) -> npt.NDArray[Any]:
        return _map(self._index, dtype, at, count)


def _size(file: Path) -> int:
    return _reading(file).stat().st_size


def _reading(file: Path) -> Path:
    """The file itself; raises DataError if it cannot be read."""
    other = ".idx" if file.suffix == ".bin" else ".bin"
    try:
        os.close(os.open(file, os.O_RDONLY))
    except FileNotFoundError as error:
        raise DataError(
            f"{file}: no such file. A dataset of Megatron-LM is two files of one name, .bin and .idx; this one is "
            f"missing beside its {other}."
        ) from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; make the file readable.") from error
    return file


def _map(file: Path, dtype: str, at: int, count: int) -> npt.NDArray[Any]:
    """A table in a file, memory-mapped; an empty one cannot be."""
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=at, shape=(count,))
