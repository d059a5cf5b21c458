"""Merge finished units, in order, into shards and document boundaries of both splits, with their manifest records.

Duplicate documents are counted and left out here, because here all units pass in the order of the corpus.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hlat.config import DataConfig
from hlat.data.manifest.bad_rows import QuarantineWriter
from hlat.data.manifest.manifest import (
    QuarantineRecord,
    ShardRecord,
    SourceRows,
    SourceTokens,
    SplitRecord,
    documents_file,
)
from hlat.data.manifest.settings import recipe_source_names
from hlat.data.prepare.duplicates import Bools, DuplicateFinder
from hlat.data.prepare.work_units import SplitIndex, UnitIndex, UnitSpan, read_index, tokens_file
from hlat.data.prepared.shards import BoundaryWriter, ShardWriter
from hlat.data.sources.source_file import SourceFile
from hlat.data.sources.split import SPLITS, Split


@dataclass
class _SplitCounts:
    """Counts of one source's documents in one split."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass
class _SourceCounts:
    """Counts of one source's rows, as in SourceRows, and of its documents in each split."""

    rows: int = 0
    null_rows: int = 0
    empty_documents: int = 0
    unreadable_rows: int = 0
    documents: int = 0
    copies: int = 0
    copied_tokens: int = 0
    splits: dict[Split, _SplitCounts] = field(default_factory=lambda: {split: _SplitCounts() for split in SPLITS})

    def add(self, span: UnitSpan, copies: Bools) -> None:
        """Count the rows of a unit; ``copies`` marks its duplicates."""
        self.rows += span.rows
        self.null_rows += span.null_rows
        self.empty_documents += span.empty_documents
        self.unreadable_rows += len(span.unreadable)
        self.documents += len(copies)
        self.copies += int(copies.sum())


class UnitMerger:
    """Merges finished units, in order; a context manager that leaves no half-written file.

    Args:
        config: the data section: tokens per shard, handling of duplicates, names of the sources.
        files: the files of the corpus, whose indexes number bad rows.
        out: folder of the shards and boundaries.
        dtype: dtype of the tokens.
        consume: True to delete the token files of units once shards hold their tokens. False to keep them; their
            checksums are then verified, since they may have been copied from another machine.

    Attributes:
        position: bytes of the corpus covered by the units merged so far.
    """

    def __init__(
        self, config: DataConfig, files: list[SourceFile], out: Path, dtype: str, *, consume: bool = True
    ) -> None:
        self._drop, self._names = config.duplicates == "drop", recipe_source_names(config)
        self._next, self._last = 0, False
        self._seen, self._consume = DuplicateFinder(), consume
        self._rows = {file.source: _SourceCounts() for file in files}
        self._quarantine = QuarantineWriter(out, files)
        self._shards = {split: ShardWriter(out, split, config.shard_tokens, dtype, consume) for split in SPLITS}
        self._documents = {split: BoundaryWriter(out / documents_file(split)) for split in SPLITS}
        self._itemsize = np.dtype(dtype).itemsize
        self.position = 0

    def __enter__(self) -> "UnitMerger":
        return self

    def __exit__(self, *_: object) -> None:
        for split in SPLITS:
            self._shards[split].abandon()
            self._documents[split].abandon()
        self._quarantine.abandon()

    def add_finished_units(self, folder: Path) -> None:
        """Add the next units of a folder for as long as they are finished."""
        while not self._last and (unit := read_index(folder, self._next)) is not None:
            self.add_unit(unit, folder)
            self._next += 1
            self._last = unit.span.last

    def add_unit(self, unit: UnitIndex, folder: Path) -> None:
        """Add the next unit of the corpus.

        Args:
            unit: its index.
            folder: the folder of its files.

        Raises:
            DataError: its files are damaged.
            OSError: a file cannot be read or written.
        """
        copies = self._seen.add(unit.hashes)
        rows = self._rows[unit.span.source]
        rows.add(unit.span, copies)
        for split in SPLITS:
            pieces = unit.splits[split]
            duplicate = copies[pieces.documents]
            rows.copied_tokens += int(pieces.lengths[duplicate].sum())
            if len(pieces.documents):
                kept = ~duplicate if self._drop else np.ones_like(duplicate)
                self._append(split, pieces, kept, rows.splits[split], tokens_file(folder, unit.span.number, split))
        self._quarantine.append(unit.span.unreadable)
        self.position = max(self.position, unit.span.position)

    def document_counts(self) -> dict[Split, int]:
        """Return the number of documents of each split so far, 0 if they have no tokens."""
        return {split: self._documents[split].documents if self._shards[split].position else 0 for split in SPLITS}

    def close(self) -> tuple[dict[Split, SplitRecord], list[SourceRows], QuarantineRecord | None]:
        """Finish all files; return the split records, the counts of rows, and the record of bad rows (or None)."""
        rows = [
            SourceRows(
                source=source,
                name=self._names[source],
                **{name: count for name, count in vars(counts).items() if name != "splits"},
            )
            for source, counts in self._rows.items()
        ]
        return {split: self._record(split) for split in SPLITS}, rows, self._quarantine.close()

    def _append(self, split: Split, pieces: SplitIndex, kept: Bools, counts: _SplitCounts, tokens: Path) -> None:
        self._shards[split].append(tokens, pieces.lengths, kept, pieces.sha256)
        self._documents[split].append(pieces.lengths[kept])
        counts.documents += int(kept.sum())
        counts.tokens += int(pieces.lengths[kept].sum())
        counts.text_bytes += int(pieces.text_bytes[kept].sum())

    def _record(self, split: Split) -> SplitRecord:
        shards = [
            ShardRecord(file=shard.name, tokens=shard.tokens, bytes=shard.tokens * self._itemsize, sha256=shard.sha256)
            for shard in self._shards[split].close()
        ]
        kept = {source: rows.splits[split] for source, rows in self._rows.items()}
        return SplitRecord(
            documents=self._documents[split].documents,
            tokens=self._shards[split].position,
            text_bytes=sum(counts.text_bytes for counts in kept.values()),
            sources=[
                SourceTokens(source=source, **vars(counts)) for source, counts in kept.items() if counts.documents
            ],
            shards=shards,
            documents_file=documents_file(split),
            documents_sha256=self._documents[split].close(),
        )
