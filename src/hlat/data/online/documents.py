"""The documents of one block partition of a source, from any position on, without end: the input of a stream.

block of the partition --formula--> position in the source's order --> block --> rows --> training documents
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hlat.data.formats.document import content_bytes
from hlat.data.online.bad_rows import BadRowMonitor
from hlat.data.online.block_index import FileBlock
from hlat.data.online.block_reader import BlockReader
from hlat.data.online.corpus_content import CorpusContent
from hlat.data.online.stream import StreamDocument
from hlat.data.online.worker_protocol import WorkerPlan
from hlat.data.samples.epoch_order import EpochOrder
from hlat.data.sources.split import SplitRule
from hlat.runtime.errors import DataError


class DocumentReader:
    """Reads documents from blocks, following a worker's plan.

    Attributes:
        content: what is known of the content of the files.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._blocks = np.load(plan.block_file, mmap_mode="r", allow_pickle=False)
        self._orders = [source.epoch_order(plan.shuffle) for source in plan.sources]
        self._split_rule = SplitRule(below=plan.validation_below)
        self._files = plan.source_files()
        self.content = CorpusContent(self._files, map(Path, plan.records), plan.fingerprint)
        self._block_reader = BlockReader(plan.vocabulary, self.content)
        self._bad_rows = BadRowMonitor(plan.unreadable_share)

    def notes(self) -> list[str]:
        """Return the notes for the user since the last call."""
        return self._bad_rows.notes()

    def documents(self, source: int, partition: int, partitions: int) -> Callable[[int, int], Iterator[StreamDocument]]:
        """Return a function (block, row) -> the documents of a block partition from there on, without end.

        Args:
            source: index of the source.
            partition: index of the block partition.
            partitions: number of block partitions of the source.
        """

        def documents(block_number: int, row: int) -> Iterator[StreamDocument]:
            empty_blocks = 0
            while True:
                # The partition's offset rotates, so that a block of only validation text cannot starve one stream.
                block = self._block(
                    source, self._orders[source], block_number * partitions + (partition + block_number) % partitions
                )
                empty_blocks += 1
                for document in self._training_documents(block, block_number, row):
                    empty_blocks = 0
                    yield document
                block_number, row = block_number + 1, 0
                self._refuse_empty_source(source, empty_blocks, self._orders[source].epoch_length)

        return documents

    def _block(self, source: int, order: EpochOrder, position: int) -> FileBlock:
        """Return the block at a position of a source's order."""
        number = self._plan.sources[source].first_block + int(order.items([position])[0])
        return FileBlock(*self._blocks[number].tolist())

    def _training_documents(self, block: FileBlock, block_number: int, row: int) -> Iterator[StreamDocument]:
        """Yield the documents of a block that are neither null nor empty nor validation text, from ``row`` on."""
        file = self._files[block.file]
        for found_row in self._block_reader.rows(file, block, row):
            self._bad_rows.count(file, block, found_row)
            content = found_row.content
            if content is not None and len(content) and self._split_rule.split_of(content_bytes(content)) == "train":
                yield StreamDocument(block_number, found_row.row, content)

    def _refuse_empty_source(self, source: int, empty_blocks: int, epoch_length: int) -> None:
        """Raise DataError after about 32 epochs of blocks without a training document.

        If one of N blocks had any, the probability of missing it that often would be e^-32.
        """
        if empty_blocks > 32 * epoch_length:
            name = self._plan.sources[source].name
            raise DataError(f"{name}: no text for training: every document is null, empty, or validation text.")
