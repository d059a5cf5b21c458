"""Blocks of the source files, and the documents in them, for tokenizing while the model trains.

    files --split_file--> blocks: ranges of a file that can be read without what precedes them
    block of a partition --formula--> position in the source's order --> block --> rows --> training documents
                                                                           |
          bytes of it --> pages --ContentRecord--> the same as before, or a DataError with the file
          files --a thread of low priority--> all pages recorded, or compared if the stamp of the file has changed

Each format divides its files as it can: into rows, documents or bytes, or not at all. Blocks are assigned to streams,
so a small corpus has small blocks: every stream should get some.

The bytes of a block are not known in Arrow, Megatron and compressed files. Only the thread compares those, so that the
first batch does not wait until a large file has been read. Files of object stores are compared only as they are read:
their version is compared whenever they are fetched.

Rows that cannot be read are reported and counted: each tokenizing process counts the rows it has read, as often as it
reads them. If data.unreadable_rows is 0, the first bad row is an error; otherwise the fraction is checked from the
hundredth bad row on, since it means little before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hlat.data.documents import SplitRule, Vocabulary, content_bytes
from hlat.data.formats.base import WHOLE, FileRange, RangeReader
from hlat.data.formats.rows import InputFile, Row, convert_file_errors
from hlat.data.online.streams import StreamDocument
from hlat.data.online.worker_protocol import WorkerPlan
from hlat.data.prepared.bad_rows import MIN_BAD_ROWS, too_many_bad_rows
from hlat.data.source_file import SourceFile
from hlat.data.stores.local_files import ContentRecord
from hlat.runtime.errors import DataError


class FileBlock(NamedTuple):
    """A range of a file of the corpus, which is read as one."""

    file: int  # index of the file
    start: int  # first row, document or byte, as the file's format counts
    stop: int  # end of the range, exclusive; ``WHOLE`` (-1) for the complete file

    @property
    def part(self) -> FileRange:
        return FileRange(self.start, self.stop)


def split_file(index: int, file: SourceFile, size: int) -> list[FileBlock]:  # size: approximate bytes of a block
    """Return the blocks of a file, in order; DataError if it cannot be read or is damaged."""
    path = Path(file.path)
    with convert_file_errors(path, file.format.kind):
        if file.cached_store is not None:  # without fetching it
            return [FileBlock(index, *part) for part in file.format.remote_ranges(path, file.size, size)]
        with file.as_input(path, None) as opened:
            return [FileBlock(index, *part) for part in file.format.ranges(opened, size)]


CONTENT_FILE = "corpus.content"
_CONTENT_PAGE = 1 << 20  # bytes that one cell of the record stands for: 8 MB of cells for 1 TB
_CONTENT_REMEDY = "Restore the file, or start a new run with another run.dir and data.prepared_dir."


class CorpusContent:
    """Compares the content of files with what records in ``folders`` know of it, for one ``fingerprint``."""

    def __init__(self, files: Sequence[SourceFile], folders: Iterable[Path], fingerprint: str) -> None:
        self._files = files
        self._parts = parts = [part for file in files for part in file.files]
        self._numbers = {id(part): number for number, part in enumerate(parts)}
        places = [folder / CONTENT_FILE for folder in folders]
        self._record = ContentRecord(
            places, [(part.path, part.size) for part in parts], _CONTENT_PAGE, fingerprint, _CONTENT_REMEDY
        )

    # end: byte after the last row that begins in the range; 0 if not known yet
    def check(self, file: SourceFile, opened: InputFile, part: FileRange, end: int = 0) -> int:
        """Compare or record the bytes of a range; return the end of what was compared."""
        number, found = self._numbers[id(file)], file.format.bytes_of(opened, part)
        if found is None:  # left to ``complete``
            return file.size
        start, stop = found[0], max(end, file.size if found[1] is None else found[1])
        for first, last in ((start, stop), (0, 1), (file.size - 1, file.size)):  # the ends say how the rest is read
            self._record.check(number, opened.path, max(first, 0), last)
        return stop

    def complete(self, worker: int = 0, workers: int = 1, budget: float = float("inf")) -> None:  # budget in bytes
        """Compare or record a worker's share of the files; DataError if one differs."""
        own = [part for file in self._files[worker::workers] for part in file.files if part.cached_store is None]
        # Recorded ones come first: they may be another text by now. Those with an unchanged stamp are not read.
        own_numbers = (self._numbers[id(part)] for part in own)
        numbers = sorted(own_numbers, key=lambda number: not self._record.is_complete(number))
        for number in numbers:
            # A file costs something by itself: many tiny files take long too.
            if (budget := budget - self._parts[number].size - (_CONTENT_PAGE >> 4)) >= 0:
                self._record.complete(number, Path(self._parts[number].path))

    def incomplete(self) -> list[SourceFile]:
        """Return the local files of which not all has been recorded."""
        local = ((number, part) for number, part in enumerate(self._parts) if part.cached_store is None)
        return [part for number, part in local if not self._record.is_complete(number)]

    def close(self) -> None:
        self._record.close()


class BlockReader:
    """Reads blocks; ``content`` None compares nothing."""

    def __init__(self, vocabulary: Vocabulary, content: CorpusContent | None = None) -> None:
        self._vocabulary, self._content = vocabulary, content
        # Readers by format; kept, for what they had to decode or to open for other blocks.
        self._readers: dict[str, RangeReader] = {}

    def rows(self, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        """Yield the rows of a block from its ``row``-th on; DataError, also if the file has changed."""
        with file.open_local() as local:
            file.check_unchanged()
            with file.as_input(local, self._vocabulary) as opened:
                # Before reading, and again at the end if the stamp has changed meanwhile.
                end = self._compare(file, opened, block)
                try:
                    for found_row in self._read_rows(file, opened, block, row):
                        # A file that is being written looks damaged: say that it has changed.
                        if found_row.error is not None:
                            file.check_unchanged()
                        end = max(end, found_row.position)
                        yield found_row
                except DataError:
                    file.check_unchanged()
                    raise
                file.check_unchanged()  # first: if it was written a moment ago, this tells what happened
                self._compare(file, opened, block, end)

    def _compare(self, file: SourceFile, opened: InputFile, block: FileBlock, end: int = 0) -> int:
        return 0 if self._content is None else self._content.check(file, opened, block.part, end)

    def _read_rows(self, file: SourceFile, opened: InputFile, block: FileBlock, row: int) -> Iterator[Row]:
        if block.stop == WHOLE:
            return file.format.documents(opened, row)
        if file.format.name not in self._readers:
            self._readers[file.format.name] = file.format.range_reader()
        return self._readers[file.format.name](opened, block.part, row)


_REPORTED_ROWS = 20  # bad rows reported one by one, and remembered, so that none is reported again an epoch later


class BadRowMonitor:
    """Counts the rows and bad rows of one process, and reports bad rows; ``share`` of them may be bad."""

    def __init__(self, share: float) -> None:
        self._share, self._rows, self._unreadable = share, 0, 0
        self._reported: set[str] = set()
        self._notes: list[str] = []

    def count(self, file: SourceFile, block: FileBlock, row: Row) -> None:
        """Count a row; DataError if it is bad and the limit is exceeded."""
        self._rows += 1
        if row.error is None:
            return
        self._unreadable += 1
        error = row.error
        where = f"{file.path}{file.format.address(block.start + row.row, error.line, row.position)}"
        if self._share == 0:
            raise DataError(
                f"{where}: {error.reason}. {error.remedy} Or set data.unreadable_rows to the share of the rows that "
                "may be left out for being unreadable."
            )
        if self._unreadable >= MIN_BAD_ROWS and too_many_bad_rows(self._unreadable, self._rows, self._share):
            raise DataError(
                f"{self._unreadable:,} of {self._rows:,} rows cannot be read; data.unreadable_rows allows a share of "
                f"{self._share:g}. The last of them: {where}: {error.reason}. {error.remedy}"
            )
        self._report(where, error.reason)

    def _report(self, where: str, reason: str) -> None:
        if where in self._reported:
            return
        if len(self._reported) < _REPORTED_ROWS:
            self._reported.add(where)
            rest = "; from now on only every hundredth is reported" if len(self._reported) == _REPORTED_ROWS else ""
            self._notes.append(f"{where}: {reason}: left out{rest}")
        elif self._unreadable % MIN_BAD_ROWS == 0:
            self._notes.append(f"{where}: {reason}: left out; unreadable row number {self._unreadable:,}")

    def notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


class DocumentReader:
    """Reads documents from blocks, following a worker's plan."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._blocks = np.load(plan.block_file, mmap_mode="r", allow_pickle=False)
        self._orders = [source.epoch_order(plan.shuffle) for source in plan.sources]
        self._split_rule = SplitRule(below=plan.validation_below)
        self._files = plan.source_files()
        self.content = CorpusContent(self._files, map(Path, plan.records), plan.fingerprint)
        self._block_reader = BlockReader(Vocabulary(plan.vocab_size, plan.settings.end), self.content)
        self.bad_rows = BadRowMonitor(plan.unreadable_share)

    def documents(self, source: int, partition: int, partitions: int) -> Callable[[int, int], Iterator[StreamDocument]]:
        """Return a function (block, row) -> the partition's documents from there on, without end."""
        own, order = self._plan.sources[source], self._orders[source]

        def documents(block_number: int, row: int) -> Iterator[StreamDocument]:
            empty_blocks = 0
            while True:
                # The partition's offset rotates, so that a block of only validation text cannot starve one stream.
                position = block_number * partitions + (partition + block_number) % partitions
                block = FileBlock(*self._blocks[own.first_block + int(order.items([position])[0])].tolist())
                empty_blocks += 1
                for document in self._training_documents(block, block_number, row):
                    empty_blocks = 0
                    yield document
                block_number, row = block_number + 1, 0
                # If one of N blocks had a document, the probability of missing it for 32 epochs would be e^-32.
                if empty_blocks > 32 * order.epoch_length:
                    raise DataError(
                        f"{own.name}: no text for training: every document is null, empty, or validation text."
                    )

        return documents

    def _training_documents(self, block: FileBlock, block_number: int, row: int) -> Iterator[StreamDocument]:
        """Yield documents from ``row`` on that are neither null, empty nor validation text."""
        file = self._files[block.file]
        for found_row in self._block_reader.rows(file, block, row):
            self.bad_rows.count(file, block, found_row)
            content = found_row.content
            if content is not None and len(content) and self._split_rule.split_of(content_bytes(content)) == "train":
                yield StreamDocument(block_number, found_row.row, content)
