"""The documents of a part of a source, from a place on, for ever: what a stream reads.

turn of the part --formula--> turn of the source --> block --> rows --> training documents
"""

from collections.abc import Callable, Iterator

import numpy as np

from hlat.data.formats import content_bytes
from hlat.data.online.bad_rows import BadRowMonitor
from hlat.data.online.block_index import FileBlock
from hlat.data.online.block_reader import BlockReader
from hlat.data.online.stream import StreamDocument
from hlat.data.online.worker_protocol import WorkerPlan
from hlat.data.samples import EpochOrder
from hlat.data.sources import SplitRule
from hlat.runtime import DataError


class DocumentReader:
    """Reads blocks of the catalogue as a plan deals them."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._blocks = np.load(plan.block_file, mmap_mode="r", allow_pickle=False)
        self._turns = [source.epoch_order(plan.shuffle) for source in plan.sources]
        self._assignment = SplitRule(below=plan.validation_below)
        self._opener = BlockReader(plan.vocabulary)
        self._faults = BadRowMonitor(plan.unreadable_share)
        self._files = plan.source_files()

    def notes(self) -> list[str]:
        """What the user should know since the last time this was asked."""
        return self._faults.notes()

    def documents(self, source: int, part: int, parts: int) -> Callable[[int, int], Iterator[StreamDocument]]:
        """(turn, row) -> the documents of a part of a source from there on."""

        def documents(turn: int, row: int) -> Iterator[StreamDocument]:
            fruitless = 0
            while True:
                # Another part of each round of blocks: one that is all validation text starves no stream for ever.
                block = self._block(source, self._turns[source], turn * parts + (part + turn) % parts)
                fruitless += 1
                for document in self._training(block, turn, row):
                    fruitless = 0
                    yield document
                turn, row = turn + 1, 0
                self._refuse_nothing(source, fruitless, self._turns[source].epoch_length)

        return documents

    def _block(self, source: int, turns: EpochOrder, turn: int) -> FileBlock:
        number = self._plan.sources[source].first_block + int(turns.items([turn])[0])
        return FileBlock(*self._blocks[number].tolist())

    def _training(self, block: FileBlock, turn: int, row: int) -> Iterator[StreamDocument]:
        """The documents of a block that are neither null nor empty nor validation text."""
        file = self._files[block.file]
        for found in self._opener.rows(file, block, row):
            self._faults.count(file, block, found)
            content = found.content
            if content is not None and len(content) and self._assignment.split_of(content_bytes(content)) == "train":
                yield StreamDocument(turn, found.row, content)

    def _refuse_nothing(self, source: int, fruitless: int, epoch: int) -> None:
        """Of N blocks, drawn anew each epoch, a single one with text is missed so often once in e^32 times."""
        if fruitless > 32 * epoch:
            name = self._plan.sources[source].name
            raise DataError(f"{name}: no text for training: every document is null, empty, or validation text.")
