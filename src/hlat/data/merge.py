"""Finished units, in their order -> shards and document boundaries of both splits, and their manifest records."""

from pathlib import Path

from hlat.data.prepared import ShardRecord, SourceTokens, SplitRecord
from hlat.data.shards import DocumentWriter, ShardWriter
from hlat.data.split import SPLITS, Split
from hlat.data.units import UnitIndex, read_index, tokens_file


class Merge:
    """Takes finished units; a context manager that leaves no half-written file.

    Args:
        units_folder: where the units are.
        out: where the shards and boundaries go.
        shard_tokens: tokens per shard.
        dtype: of the tokens.
    """

    def __init__(self, units_folder: Path, out: Path, shard_tokens: int, dtype: str) -> None:
        self._units, self._next = units_folder, 0
        self._last = False
        self._text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self._sources: dict[Split, dict[int, list[int]]] = {split: {} for split in SPLITS}
        self.null_rows = self.empty_documents = self.position = 0
        self.shards = {split: ShardWriter(out, split, shard_tokens, dtype) for split in SPLITS}
        self.documents = {split: DocumentWriter(out / f"{split}-documents.bin") for split in SPLITS}
        self._itemsize = {"uint16": 2, "uint32": 4}[dtype]

    def __enter__(self) -> "Merge":
        return self

    def __exit__(self, *_: object) -> None:
        for split in SPLITS:
            self.shards[split].abandon()
            self.documents[split].abandon()

    def take_finished(self) -> None:
        """Take every unit that is finished and has only finished ones before it."""
        while not self._last and (unit := read_index(self._units, self._next)) is not None:
            self._take(unit)
            self._next += 1

    def close(self) -> dict[Split, SplitRecord]:
        """Finish all files; returns what they hold."""
        assert self._last, "the merge ends with the last unit"
        return {split: self._record(split) for split in SPLITS}

    def _take(self, unit: UnitIndex) -> None:
        span = unit.span
        for split in SPLITS:
            part = unit.splits[split]
            if part.lengths:
                self.shards[split].append(tokens_file(self._units, span.number, split), sum(part.lengths))
                self.documents[split].append(part.lengths)
                counts = self._sources[split].setdefault(span.source, [0, 0])
                counts[0] += len(part.lengths)
                counts[1] += sum(part.lengths)
            self._text_bytes[split] += part.text_bytes
        self.null_rows += span.null_rows
        self.empty_documents += span.empty_documents
        self.position = max(self.position, span.position)
        self._last = span.last

    def _record(self, split: Split) -> SplitRecord:
        shards = [
            ShardRecord(file=shard.name, tokens=shard.tokens, bytes=shard.tokens * self._itemsize, sha256=shard.sha256)
            for shard in self.shards[split].close()
        ]
        return SplitRecord(
            documents=self.documents[split].documents,
            tokens=self.shards[split].position,
            text_bytes=self._text_bytes[split],
            sources=[
                SourceTokens(source=source, documents=documents, tokens=tokens)
                for source, (documents, tokens) in self._sources[split].items()
            ],
            shards=shards,
            documents_file=f"{split}-documents.bin",
            documents_sha256=self.documents[split].close(),
        )
