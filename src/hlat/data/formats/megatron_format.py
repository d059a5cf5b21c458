"""Datasets of Megatron-LM: .bin and .idx, whose documents are tokens already.

    tokens of a document --all in the vocabulary?--> end-of-sequence token removed, if it is last --> Row
    .idx --> ranges of documents

Opening a dataset verifies its index, so datasets that were opened for a range are kept open.
"""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hlat.data.formats.base import Companion, FileFormat
from hlat.data.formats.megatron import MegatronDataset, StoredTokens, index_path
from hlat.data.formats.ranges import FileRange, RangeReader, cut_rows
from hlat.data.formats.records import InputFile, Row
from hlat.data.tokenizers.base import TokenIdArray
from hlat.runtime.errors import DataError

_DOCUMENTS_PER_READ = 1 << 20  # document lengths read at a time
_MAX_DATASETS = 256  # maximum number of open datasets: a process can map only so many files


class MegatronFormat(FileFormat):
    """Datasets of Megatron-LM."""

    kind = "megatron"
    endings = (".bin", ".idx")
    companion = Companion(
        ".bin", ".idx", index_path, "A Megatron-LM dataset consists of two files with the same name, .bin and .idx"
    )

    @property
    def holds_tokens(self) -> bool:
        """True: the documents are token ids."""
        return True

    def check(self, path: Path) -> None:
        """Accept any file: opening the dataset checks everything."""

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        yield from _Documents(file).rows(file, start)

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        """Yield ranges of documents; each begins with the first document after another ``size`` bytes."""
        dataset = MegatronDataset(file.path, file.companion)
        first = total = last = 0
        for start in range(0, len(dataset), _DOCUMENTS_PER_READ):
            lengths = (
                dataset.document_lengths(start, min(start + _DOCUMENTS_PER_READ, len(dataset))) * dataset.dtype.itemsize
            )
            ends = total + np.cumsum(lengths)
            numbers = (ends - lengths) // size
            for edge in (start + np.flatnonzero(np.diff(numbers, prepend=last))).tolist():
                yield FileRange(first, edge)
                first = edge
            total, last = int(ends[-1]), int(numbers[-1])
        if first < len(dataset):
            yield FileRange(first, len(dataset))

    def range_reader(self) -> RangeReader:
        """Return a reader of ranges of documents, which keeps datasets open."""
        return _DocumentReader()


class _Documents:
    """Documents of one dataset, by their index.

    Args:
        file: its .bin, and its .idx as the companion.

    Raises:
        DataError: see MegatronDataset.
    """

    def __init__(self, file: InputFile) -> None:
        self._dataset = MegatronDataset(file.path, file.companion)
        self._bytes = self._dataset.tokens * self._dataset.dtype.itemsize

    def rows(self, file: InputFile, start: int, stop: int | None = None) -> Iterator[Row]:
        """Yield the documents ``start <= row < stop``, to the end if ``stop`` is None; tokens are uint32.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        total = len(self._dataset)
        for number in range(start, total if stop is None else stop):
            tokens = _check(file, number, self._dataset.document(number))
            yield Row(number, tokens, self._bytes * (number + 1) // total)


class _DocumentReader:
    """Reader of ranges of documents, which keeps datasets open."""

    def __init__(self) -> None:
        self._datasets: OrderedDict[Path, _Documents] = OrderedDict()

    def rows(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        dataset = self._datasets.pop(file.path, None) or _Documents(file)
        if file.stays:
            self._datasets[file.path] = dataset
            while len(self._datasets) > _MAX_DATASETS:
                self._datasets.popitem(last=False)
        yield from cut_rows(dataset.rows(file, part.start + row, part.stop), part)


def _check(file: InputFile, number: int, tokens: StoredTokens) -> TokenIdArray:
    position = file.known_ids.first_unknown(tokens)
    if position is not None:
        raise DataError(
            f"{file.path}, document {number}: its token {position} has the id {tokens[position]}, but the ids of "
            f"data.tokenizer.path are 0 to {file.known_ids.size - 1}. Give the tokenizer that the dataset was written "
            "with."
        )
    return file.known_ids.document(tokens)
