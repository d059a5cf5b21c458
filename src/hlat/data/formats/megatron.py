"""Megatron-LM's indexed datasets: a .bin of tokens, and an .idx with the positions of its documents.

    .idx --verified--> documents --> ranges of documents
    tokens of a document --all in the vocabulary?--> end-of-sequence token removed, if it is last --> Row

name.idx, little-endian throughout:
    9 bytes   "MMIDIDX", two zero bytes
    uint64    version, 1
    uint8     type of the tokens in the .bin: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 and 7 floats, 8 uint16
    uint64    sequences
    uint64    entries of the last table: documents + 1
    int32     per sequence: its number of tokens
    int64     per sequence: byte of the .bin at which it begins
    int64     per document: index of its first sequence; after the last document, the number of sequences
    int8      per sequence: its modality; only in multimodal datasets, which are not read
name.bin: the tokens of all sequences.

Opening a dataset verifies its index, so datasets that were opened for a range are kept open.

The format is defined by megatron/core/datasets/indexed_dataset.py and megatron/core/datasets/readme.md in
https://github.com/NVIDIA/Megatron-LM, from MMapIndexedDataset (2019) on; GPT-NeoX and NeMo write the same.
"""

import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.data.formats.base import Companion, FileFormat, FileRange, RangeReader, cut_rows
from hlat.data.formats.rows import InputFile, Row
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import HEAD_BYTES, recognize

StoredTokens = npt.NDArray[np.integer[Any]]

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6, 7}
_REMEDY = "Write it again with Megatron's tools/preprocess_data.py, or fetch both files again."
_CHECK_ENTRIES = 1 << 20  # table entries checked at once; an index can be larger than memory


def index_path(data: str) -> str:
    """Return the path or URL of the .idx of a .bin."""
    return data.removesuffix(".bin") + ".idx"


class MegatronDataset:
    """Documents of one dataset, memory-mapped; opening it checks everything except the tokens.

    Without ``index`` the .idx next to the .bin is used. ``dtype`` is a little-endian integer. DataError if a file is
    missing, unreadable, truncated or damaged, or if the two do not belong together.
    """

    def __init__(self, data: Path, index: Path | None = None) -> None:
        self._data, self._index = data, index or Path(index_path(str(data)))
        index_bytes, self._bytes = _size(self._index), _size(data)
        code, self.sequences, entries = self._read_header(index_bytes)  # a document has zero or more sequences
        self.dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        offset = _HEADER.size
        self._lengths = _map(self._index, "<i4", offset, self.sequences)
        offset += self._lengths.nbytes
        self._begins = _map(self._index, "<i8", offset, self.sequences)
        offset += self._begins.nbytes
        self._firsts = _map(self._index, "<i8", offset, entries)
        self.documents = entries - 1  # the last entry is the end
        self._check_documents()
        self.tokens = self._check_sequences()
        self._mapped: StoredTokens = _map(data, self.dtype.str, 0, self._bytes // self.dtype.itemsize)

    def __len__(self) -> int:
        return self.documents

    def document(self, number: int) -> StoredTokens:
        """Return the tokens of a document, shape (tokens,), read-only; a view if they are contiguous."""
        first, end = int(self._firsts[number]), int(self._firsts[number + 1])
        starts, lengths = self._begins[first:end] // self.dtype.itemsize, self._lengths[first:end].astype(np.int64)
        ends = starts + lengths
        if len(starts) and bool(np.all(ends[:-1] == starts[1:])):
            return self._mapped[int(starts[0]) : int(ends[-1])]
        sequences = (self._mapped[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
        joined = np.concatenate([np.empty(0, self.dtype), *sequences])
        joined.flags.writeable = False
        return joined

    def rows(self, file: InputFile, start: int, stop: int | None = None) -> Iterator[Row]:
        """Yield the documents ``start <= row < stop`` as uint32; DataError for an id outside the vocabulary."""
        for number in range(start, self.documents if stop is None else stop):
            tokens, known = self.document(number), file.known_ids
            if (position := known.first_unknown(tokens)) is not None:
                raise DataError(
                    f"{file.path}, document {number}: its token {position} has the id {tokens[position]}, but the ids "
                    f"of data.tokenizer.path are 0 to {known.size - 1}. Give the tokenizer that the dataset was "
                    "written with."
                )
            position = self.tokens * self.dtype.itemsize * (number + 1) // self.documents
            yield Row(number, known.document(tokens), position)

    def document_lengths(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
        """Return the tokens of the documents from ``start`` to before ``end``, int64."""
        firsts = self._firsts[start : (self.documents if end is None else end) + 1]
        totals = np.concatenate([[0], np.cumsum(self._lengths[firsts[0] : firsts[-1]], dtype=np.int64)])
        return np.asarray(np.diff(totals[firsts - firsts[0]]), dtype=np.int64)

    # --- checks ----------------------------------------------------------------------------------------------------

    def _read_header(self, size: int) -> tuple[int, int, int]:
        """Return type code, number of sequences, and entries of the document table."""
        with _check_readable(self._index).open("rb") as file:
            head = file.read(_HEADER.size)
        if head.startswith(_OLD_MAGIC):
            raise DataError(
                f"{self._index}: an index of the older format (TNTIDX, --dataset-impl lazy or cached), which hlat does "
                "not read. Write the dataset again with --dataset-impl mmap."
            )
        # Only compared as far as it goes: a short file is truncated, not of another kind.
        if not head.startswith(_MAGIC[: len(head)]) and (found := recognize(head)):
            raise DataError(f"{self._index}: not an index of Megatron-LM: it begins like {found.what}. {found.remedy}")
        if not head.startswith(_MAGIC[: len(head)]) or not head:
            raise self._damaged(f": not an index of Megatron-LM: it begins with {head[:9]!r}, not {_MAGIC!r}")
        if len(head) < _HEADER.size:
            raise self._damaged(f": truncated within its header, after {size} bytes")
        _, version, code, sequences, entries = _HEADER.unpack(head)
        if version != 1:
            raise self._damaged(f": version {version} of the format at byte 9; hlat reads version 1")
        self._check_type(code)
        self._check_size(size, sequences, entries)
        return code, sequences, entries

    def _check_type(self, code: int) -> None:
        if code in _FLOATS:
            raise DataError(f"{self._index}: holds floating-point numbers (type code {code} at byte 17), not tokens.")
        if code not in _DTYPES:
            known = ", ".join(f"{known} {name}" for known, name in _DTYPES.items())
            raise self._damaged(f": unknown type code {code} at byte 17; known are {known}")

    def _check_size(self, size: int, sequences: int, entries: int) -> None:
        if entries < 1:
            raise self._damaged(": its document table has no entry (byte 26), not even the end")
        expected = _HEADER.size + 12 * sequences + 8 * entries
        if size == expected + sequences and sequences:
            raise DataError(
                f"{self._index}: a multimodal dataset: each sequence has a modality, and only text is read."
            )
        if size != expected:
            problem = "truncated" if size < expected else "longer than its header says"
            described = f"{sequences:,} sequences and {entries - 1:,} documents take {expected:,}"
            raise self._damaged(f": {problem}: {size:,} bytes, but {described}")

    def _check_documents(self) -> None:
        for start in range(0, len(self._firsts), _CHECK_ENTRIES):
            firsts = self._firsts[start : start + _CHECK_ENTRIES + 1]
            if (wrong := np.flatnonzero(firsts[1:] < firsts[:-1])).size:
                number = start + int(wrong[0])
                first, end = self._firsts[number], self._firsts[number + 1]
                where = f", document {number}: begins at sequence {first} and ends at {end}"
                raise self._damaged(f"{where}, before its beginning")
        if self._firsts[0] != 0 or self._firsts[-1] != self.sequences:
            found = f"sequences {self._firsts[0]} to {self._firsts[-1]}"
            raise self._damaged(f": its documents have {found}, but the dataset has 0 to {self.sequences}")

    def _check_sequences(self) -> int:
        """Check that the sequences cover the .bin to its end; return the number of tokens."""
        total = end = 0
        for start in range(0, self.sequences, _CHECK_ENTRIES):
            lengths = self._lengths[start : start + _CHECK_ENTRIES].astype(np.int64)
            begins = self._begins[start : start + _CHECK_ENTRIES]
            ends = begins + lengths * self.dtype.itemsize
            # The last bound, so that the sums above cannot have overflowed unseen.
            wrong = (lengths < 0) | (begins < 0) | (begins % self.dtype.itemsize != 0) | (begins > 1 << 62)
            if (indices := np.flatnonzero(wrong)).size:
                number = start + int(indices[0])
                where = f", sequence {number}: {self._lengths[number]} tokens at byte {self._begins[number]}"
                data = f"{self._data}, {self._bytes:,} bytes of {self.dtype.name}"
                raise self._damaged(f"{where}, which is not a valid range of {data}")
            if (indices := np.flatnonzero(ends > self._bytes)).size:
                raise self._truncated(start + int(indices[0]))
            total, end = total + int(lengths.sum()), max(end, int(ends.max(initial=0)))
        if end != self._bytes:
            raise DataError(
                f"{self._data}: {self._bytes:,} bytes, but {self._index} describes only the first {end:,}: they do not "
                f"belong together. {_REMEDY}"
            )
        return total

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self._index}{problem}. {_REMEDY}")

    def _truncated(self, number: int) -> DataError:
        with self._data.open("rb") as file:
            head = file.read(HEAD_BYTES)
        # Tokens may look like anything but text, as pointers and pages of HTML are.
        if head.isascii() and b"\0" not in head and (found := recognize(head)):
            return DataError(f"{self._data}: not the tokens of a dataset: it begins like {found.what}. {found.remedy}")
        end = int(self._begins[number]) + int(self._lengths[number]) * self.dtype.itemsize
        return DataError(
            f"{self._data}: truncated: {self._bytes:,} bytes, but sequence {number} of {self._index} ends at byte "
            f"{end:,}. {_REMEDY}"
        )


def _size(file: Path) -> int:
    return _check_readable(file).stat().st_size


def _check_readable(file: Path) -> Path:
    other = ".idx" if file.suffix == ".bin" else ".bin"
    try:
        os.close(os.open(file, os.O_RDONLY))
    except FileNotFoundError as error:
        raise DataError(
            f"{file}: no such file. A Megatron-LM dataset consists of two files with the same name, .bin and .idx; "
            f"next to its {other}, this one is missing."
        ) from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; make the file readable.") from error
    return file


def _map(file: Path, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    if count == 0:  # an empty array cannot be memory-mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,))


_DOCUMENTS_PER_READ = 1 << 20  # document lengths read at a time
_MAX_DATASETS = 256  # maximum number of open datasets: a process can map only so many files


class MegatronFormat(FileFormat):
    """Datasets of Megatron-LM: pairs of a .bin and an .idx."""

    kind = "megatron"
    endings = (".bin", ".idx")
    companion = Companion(
        ".bin", ".idx", index_path, "A Megatron-LM dataset consists of two files with the same name, .bin and .idx"
    )

    @property
    def holds_tokens(self) -> bool:
        return True

    def check(self, path: Path) -> None:
        """Accept any file: opening the dataset checks everything."""

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        yield from MegatronDataset(file.path, file.companion).rows(file, start)

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        dataset = MegatronDataset(file.path, file.companion)
        first = total = last = 0
        for start in range(0, len(dataset), _DOCUMENTS_PER_READ):
            lengths = dataset.document_lengths(start, start + _DOCUMENTS_PER_READ) * dataset.dtype.itemsize
            ends = total + np.cumsum(lengths)
            numbers = (ends - lengths) // size
            # A range begins with the first document after another ``size`` bytes.
            for edge in (start + np.flatnonzero(np.diff(numbers, prepend=last))).tolist():
                yield FileRange(first, edge)
                first = edge
            total, last = int(ends[-1]), int(numbers[-1])
        if first < len(dataset):
            yield FileRange(first, len(dataset))

    def range_reader(self) -> RangeReader:
        return _DocumentReader().rows


class _DocumentReader:
    """Reader of ranges of documents, which keeps datasets open: opening one verifies its index."""

    def __init__(self) -> None:
        self._datasets: OrderedDict[Path, MegatronDataset] = OrderedDict()

    def rows(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        dataset = self._datasets.pop(file.path, None) or MegatronDataset(file.path, file.companion)
        if file.stays:  # a cache must be able to delete its files, which an open map would keep on the disk
            self._datasets[file.path] = dataset
            while len(self._datasets) > _MAX_DATASETS:
                self._datasets.popitem(last=False)
        yield from cut_rows(dataset.rows(file, part.start + row, part.stop), part)
