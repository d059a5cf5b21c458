"""Division of prepared data into rows; the plan of ``best-fit`` packing is computed once and stored.

    <prepared>/rows/best-fit-<S>-<data>-<first document>-<documents>/
        rows.npy, documents.npy, offsets.npy, lengths.npy, and sums.json with their checksums

A plan that does not match its checksums is computed again. If the folder is not writable, every process computes the
plan for itself: a million documents take a second.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hlat.config import DataConfig
from hlat.data.manifest.record_checksum import checksum_matches, with_checksum
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.best_fit import BestFitPlan, fit_documents
from hlat.data.samples.packed_rows import BestFitRows, ConcatRows, PackedRows
from hlat.data.sources.source_file import sha256_of
from hlat.data.stores.atomic_files import sync_folder, write_atomic
from hlat.runtime.errors import DataError

_ARRAYS = ("rows", "documents", "offsets", "lengths")
_SUMS = "sums.json"
_FITTED_TOGETHER = 1 << 22  # documents packed jointly; more would take gigabytes and hardly reduce padding


@dataclass(frozen=True)
class DocumentRange:
    """Consecutive documents of a split, and their tokens.

    Attributes:
        first_document: index of the first document.
        documents: number of documents.
        first_token: position of the first token in the split.
        tokens: number of tokens; the last document may be cut off.
    """

    first_document: int
    documents: int
    first_token: int
    tokens: int


@dataclass(frozen=True)
class PackingWaste:
    """Padding and cut documents of ``best-fit`` packing.

    Attributes:
        padding: positions without a token.
        positions: all positions of an epoch.
        cut: documents longer than a row, which are cut.
        documents: all documents.
    """

    padding: int
    positions: int
    cut: int
    documents: int

    def __str__(self) -> str:
        fraction = self.padding / max(self.positions, 1)
        return (
            f"best-fit: {self.padding:,} of {self.positions:,} positions are padding ({fraction:.2%}); "
            f"{self.cut:,} of {self.documents:,} documents are longer than a sequence and are cut"
        )


def all_training_documents(prepared: PreparedData) -> DocumentRange:
    """Return the range of all training documents."""
    record = prepared.manifest.splits["train"]
    return DocumentRange(0, record.documents, 0, record.tokens)


def source_ranges(prepared: PreparedData, config: DataConfig) -> list[DocumentRange]:
    """Return the training documents of each source, limited to its max_tokens; the range is empty if it has none."""
    ranges, document, token = {}, 0, 0
    for record in prepared.manifest.splits["train"].sources:
        ranges[record.source] = DocumentRange(document, record.documents, token, record.tokens)
        document, token = document + record.documents, token + record.tokens
    return [
        _limit_tokens(prepared, ranges.get(index, DocumentRange(0, 0, 0, 0)), source.max_tokens)
        for index, source in enumerate(config.sources)
    ]


def _limit_tokens(prepared: PreparedData, documents: DocumentRange, limit: int | None) -> DocumentRange:
    """Return the leading part of a range, of at most ``limit`` tokens; its last document may be cut off."""
    if limit is None or documents.tokens <= limit:
        return documents
    starts = prepared.document_boundaries("train")
    end = documents.first_document + documents.documents
    count = int(np.searchsorted(starts[documents.first_document + 1 : end + 1], documents.first_token + limit, "right"))
    return DocumentRange(documents.first_document, count, documents.first_token, limit)


def pack_rows(prepared: PreparedData, documents: DocumentRange, length: int, packing: str) -> PackedRows:
    """Divide a range of documents into rows of ``length`` tokens, with the given packing ("concat" or "best-fit")."""
    if packing == "concat":
        return ConcatRows(documents.first_token, documents.tokens, length)
    return BestFitRows(
        prepared.document_boundaries("train"), documents.first_document, _load_or_fit(prepared, documents, length)
    )


def measure_waste(prepared: PreparedData, rows: BestFitRows, documents: DocumentRange, length: int) -> PackingWaste:
    """Count the padding and the cut documents of ``best-fit`` rows."""
    starts = prepared.document_boundaries("train")[
        documents.first_document : documents.first_document + documents.documents + 1
    ]
    sizes = np.diff(starts.astype(np.int64))
    positions = len(rows) * length
    return PackingWaste(positions - int(sizes.sum()), positions, int((sizes > length).sum()), documents.documents)


def _load_or_fit(prepared: PreparedData, documents: DocumentRange, length: int) -> BestFitPlan:
    """Load the packing plan from disk, or compute it and try to store it."""
    name = f"best-fit-{length}-{prepared.fingerprint[:16]}-{documents.first_document}-{documents.documents}"
    folder = prepared.dir / "rows" / name
    if (stored := _load_plan(folder)) is None:
        starts = prepared.document_boundaries("train")[
            documents.first_document : documents.first_document + documents.documents + 1
        ]
        computed = _fit_in_chunks(np.diff(starts.astype(np.int64)), length)
        try:
            _save_plan(computed, folder)
        except OSError:
            return computed
        return _load_plan(folder) or computed
    return stored


def _load_plan(folder: Path) -> BestFitPlan | None:
    """Load the plan that ``_save_plan`` wrote; None if it is missing or damaged."""
    try:
        sums = json.loads((folder / _SUMS).read_bytes())
        if not checksum_matches(sums) or any(sha256_of(folder / f"{name}.npy") != sums[name] for name in _ARRAYS):
            return None
        return BestFitPlan(*(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS))
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, DataError):
        return None


def _fit_in_chunks(sizes: np.ndarray, length: int) -> BestFitPlan:
    """Pack documents in chunks of ``_FITTED_TOGETHER``, and join the plans."""
    chunks, rows, pieces = [], 0, 0
    for first in range(0, max(len(sizes), 1), _FITTED_TOGETHER):
        chunk = fit_documents(sizes[first : first + _FITTED_TOGETHER], length)
        chunks.append((chunk.rows[:-1] + pieces, chunk.documents + first, chunk.offsets, chunk.lengths))
        rows, pieces = rows + len(chunk.rows) - 1, pieces + len(chunk.lengths)
    starts, documents, offsets, lengths = (np.concatenate(column) for column in zip(*chunks, strict=True))
    return BestFitPlan(np.append(starts, pieces), documents, offsets, lengths)


def _save_plan(plan: BestFitPlan, folder: Path) -> None:
    """Write the plan to a temporary folder, then rename it: an existing folder is complete."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        for name in _ARRAYS:
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(plan, name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sums = with_checksum({name: sha256_of(temporary / f"{name}.npy") for name in _ARRAYS})
        write_atomic(temporary / _SUMS, json.dumps(sums).encode())
        sync_folder(temporary)
        if _load_plan(folder) is None:  # otherwise another process has just stored the same plan
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
