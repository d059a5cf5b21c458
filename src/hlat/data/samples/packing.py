"""The rows of prepared data: of all of it, or of each source; the plan of ``best-fit`` is made once and kept.

<prepared>/rows/best-fit-<S>-<data>-<first document>-<documents>/
    rows.npy, documents.npy, offsets.npy, lengths.npy, and sums.json, their checksums

A plan that is not what its checksums say is made anew. Where the folder cannot be written to, every process makes the
plan for itself: a million documents take a second.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hlat.config.sections import DataConfig
from hlat.data.manifest import checksum_matches, with_checksum
from hlat.data.prepared import PreparedData
from hlat.data.samples.best_fit import BestFitPlan, fit_documents
from hlat.data.samples.packed_rows import BestFitRows, ConcatRows, PackedRows
from hlat.data.sources import sha256_of
from hlat.data.stores import sync_folder, write_atomic
from hlat.runtime import DataError

_ARRAYS = ("rows", "documents", "offsets", "lengths")
_SUMS = "sums.json"
_TOGETHER = 1 << 22  # documents that are fitted together; more would take gigabytes and save next to nothing


@dataclass(frozen=True)
class DocumentRange:
    """Consecutive documents of a split."""

    first_document: int
    documents: int
    first_token: int
    tokens: int


@dataclass(frozen=True)
class PackingWaste:
    """What ``best-fit`` costs.

    Attributes:
        padding: positions that hold no token.
        positions: all positions of an epoch.
        cut: documents that are longer than a row.
        documents: all of them.
    """

    padding: int
    positions: int
    cut: int
    documents: int

    def __str__(self) -> str:
        share = self.padding / max(self.positions, 1)
        return (
            f"best-fit: {self.padding:,} of {self.positions:,} positions are padding ({share:.2%}); "
            f"{self.cut:,} of {self.documents:,} documents are longer than a sequence and are cut"
        )


def all_training_documents(prepared: PreparedData) -> DocumentRange:
    """All training documents."""
    record = prepared.manifest.splits["train"]
    return DocumentRange(0, record.documents, 0, record.tokens)


def source_ranges(prepared: PreparedData, config: DataConfig) -> list[DocumentRange]:
    """The training documents of each source, as many as it may give; none for a source that has none."""
    ranges, document, token = {}, 0, 0
    for share in prepared.manifest.splits["train"].sources:
        ranges[share.source] = DocumentRange(document, share.documents, token, share.tokens)
        document, token = document + share.documents, token + share.tokens
    return [
        _limit_tokens(prepared, ranges.get(index, DocumentRange(0, 0, 0, 0)), source.max_tokens)
        for index, source in enumerate(config.sources)
    ]


def _limit_tokens(prepared: PreparedData, span: DocumentRange, most: int | None) -> DocumentRange:
    """Its first documents, of ``most`` tokens at most; the last one is cut off where it would be too many."""
    if most is None or span.tokens <= most:
        return span
    starts = prepared.document_boundaries("train")
    end = span.first_document + span.documents
    documents = int(np.searchsorted(starts[span.first_document + 1 : end + 1], span.first_token + most, "right"))
    return DocumentRange(span.first_document, documents, span.first_token, most)


def pack_rows(prepared: PreparedData, span: DocumentRange, length: int, packing: str) -> PackedRows:
    """The rows of a stretch."""
    if packing == "concat":
        return ConcatRows(span.first_token, span.tokens, length)
    return BestFitRows(prepared.document_boundaries("train"), span.first_document, _load_or_fit(prepared, span, length))


def measure_waste(prepared: PreparedData, rows: BestFitRows, span: DocumentRange, length: int) -> PackingWaste:
    """What fitting costs in a stretch."""
    starts = prepared.document_boundaries("train")[span.first_document : span.first_document + span.documents + 1]
    sizes = np.diff(starts.astype(np.int64))
    positions = len(rows) * length
    return PackingWaste(positions - int(sizes.sum()), positions, int((sizes > length).sum()), span.documents)


def _load_or_fit(prepared: PreparedData, span: DocumentRange, length: int) -> BestFitPlan:
    """The plan, from the disk if it has been made before."""
    name = f"best-fit-{length}-{prepared.fingerprint[:16]}-{span.first_document}-{span.documents}"
    folder = prepared.dir / "rows" / name
    if (kept := _load_plan(folder)) is None:
        starts = prepared.document_boundaries("train")[span.first_document : span.first_document + span.documents + 1]
        fitted = _fit_in_chunks(np.diff(starts.astype(np.int64)), length)
        try:
            _save_plan(fitted, folder)
        except OSError:
            return fitted
        return _load_plan(folder) or fitted
    return kept


def _load_plan(folder: Path) -> BestFitPlan | None:
    """The plan that ``_keep`` wrote; None where there is none, or where it is damaged, so that it is made again."""
    try:
        sums = json.loads((folder / _SUMS).read_bytes())
        if not checksum_matches(sums) or any(sha256_of(folder / f"{name}.npy") != sums[name] for name in _ARRAYS):
            return None
        return BestFitPlan(*(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS))
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, DataError):
        return None


def _fit_in_chunks(sizes: np.ndarray, length: int) -> BestFitPlan:
    parts, rows, pieces = [], 0, 0
    for first in range(0, max(len(sizes), 1), _TOGETHER):
        part = fit_documents(sizes[first : first + _TOGETHER], length)
        parts.append((part.rows[:-1] + pieces, part.documents + first, part.offsets, part.lengths))
        rows, pieces = rows + len(part.rows) - 1, pieces + len(part.lengths)
    starts, documents, offsets, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    return BestFitPlan(np.append(starts, pieces), documents, offsets, lengths)


def _save_plan(fitted: BestFitPlan, folder: Path) -> None:
    """Write the plan under a temporary name and give it its own at last: what is there is whole."""
    making = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    making.mkdir(parents=True)
    try:
        for name in _ARRAYS:
            with (making / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(fitted, name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sums = with_checksum({name: sha256_of(making / f"{name}.npy") for name in _ARRAYS})
        write_atomic(making / _SUMS, json.dumps(sums).encode())
        sync_folder(making)
        if _load_plan(folder) is None:  # unless another process has just made the same
            shutil.rmtree(folder, ignore_errors=True)
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
