"""The staging folder of a preparation: finished units are merged in it into prepared data, which is then published.

    units, in order --UnitMerger--> shards, document boundaries, records --complete_staging--> partial/out/
    partial/out/* --publish: rename--> <dir>/*, the manifest last

<dir>/partial/key.json     identity of the preparation: data format, settings, content of every file
<dir>/partial/hashes.json  hashes of the files
<dir>/partial/units/       finished units
<dir>/partial/out/         the result under construction

Work of the same preparation is resumed, finished work of another is never deleted. Duplicate documents are counted and
left out by the merger, because there all units pass in the order of the corpus.

Hashes are kept so that only files that may have changed are read again. A file is identified by path, size, and
modification time or ETag. The manifest has the hashes of the files that the data was made from; ``hashes.json`` has
those of files that were touched, copied or moved since.
"""

import json
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config import DataConfig
from hlat.data.corpus_files import describe_corpus_changes, numbered_sources
from hlat.data.documents import SPLITS, HeldOut, Split, describe_scarce, describe_tails
from hlat.data.prepare.corpus import ProgressCallback
from hlat.data.prepare.work_units import (
    Bools,
    DuplicateFinder,
    SplitIndex,
    UnitIndex,
    read_index,
    tokens_file,
)
from hlat.data.prepared.bad_rows import QuarantineWriter
from hlat.data.prepared.consistency import TAILS, recipe_locations, setting_differences
from hlat.data.prepared.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    WORK_VERSION,
    DataManifest,
    QuarantineRecord,
    SourceRecord,
    SourceRows,
    SourceTokens,
    SplitRecord,
    content_fingerprint,
    documents_file,
    write_record,
)
from hlat.data.prepared.shards import CHECKSUM_SUFFIX, BoundaryWriter, ShardWriter, token_dtype
from hlat.data.source_file import SourceFile, Stamp
from hlat.data.source_listing import doubts
from hlat.data.tokenizers.base import Tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import sync_to_disk, write_atomic
from hlat.runtime.terminal import plural

HASHES = "hashes.json"

KnownHashes = dict[Stamp, str]  # the sha256 of files by their identity


def load_hashes(folder: Path, manifest: DataManifest | None = None) -> KnownHashes:
    """Load the hashes of a folder and its manifest; if ``hashes.json`` is damaged, its files are hashed again."""
    try:
        stored = json.loads((folder / HASHES).read_bytes())
        saved = {
            (str(path), int(size), int(mtime), str(etag)): str(sha256) for path, size, mtime, etag, sha256 in stored
        }
    except (OSError, ValueError, TypeError, RecursionError):
        saved = {}
    records = [] if manifest is None else [file for source in manifest.sources for file in source.files]
    return {(record.path, record.bytes, record.mtime_ns, record.etag): record.sha256 for record in records} | saved


def save_hashes(folder: Path, files: list[SourceFile]) -> None:
    """Replace ``hashes.json`` by the hashes of these files; OSError if the disk refuses."""
    stored = [(*file.stamp, file.sha256) for source in files for file in source.files]
    write_atomic(folder / HASHES, json.dumps(stored).encode())


def update_hashes(folder: Path, files: list[SourceFile], known: KnownHashes) -> None:
    """Save the hashes of the files if some are not in ``known``."""
    if any(file.stamp not in known for source in files for file in source.files):
        with suppress(OSError):  # only a convenience: a folder that cannot be written to is still good to train on
            save_hashes(folder, files)


PARTIAL = "partial"
_KEY_FILE = "key.json"


@dataclass(frozen=True)
class StagingFolder:
    """The staging folder inside the output folder, where interrupted work is resumed, and what is made in it."""

    folder: Path  # the output folder
    config: DataConfig
    settings: dict[str, Any]  # see ``content_settings``
    report: ProgressCallback
    workers: int | None = None  # processes; None for one per core

    @property
    def root(self) -> Path:
        return self.folder / PARTIAL

    @property
    def units(self) -> Path:
        return self.root / "units"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def claim(self, files: list[SourceFile], part: dict[str, Any] | None = None) -> None:
        """Prepare the folder, keeping work of the same preparation; DataError for finished work of another."""
        settings = {**(part or {}), **self.settings}
        if not self._can_resume(settings, files):
            # First, so that a half-deleted folder is not mistaken for unfinished work.
            (self.root / _KEY_FILE).unlink(missing_ok=True)
            shutil.rmtree(self.root, ignore_errors=True)
            self._refuse_foreign_files()
        self.units.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(exist_ok=True)
        # Half-written files of a run that was killed.
        for leftover in [*self.units.glob("*.tmp"), *self.out.glob("*.tmp")]:
            leftover.unlink()
        save_hashes(self.root, files)
        content = [[file.path, file.content] for file in files]
        key = {"format": WORK_VERSION, "settings": settings, "files": content}
        # Last: a folder with a key can be resumed.
        write_atomic(self.root / _KEY_FILE, json.dumps(key).encode())

    def _can_resume(self, settings: dict[str, Any], files: list[SourceFile]) -> bool:
        """Return False if the folder may be deleted; DataError for finished units of another preparation."""
        reasons = self._differences_from(settings, files)
        # Finished units may have taken days: the user decides.
        if reasons and next(self.units.glob("*.json"), None) is not None:
            raise DataError(
                f"{self.root}: holds finished work of an interrupted preparation that differs from this one:"
                + "".join(f"\n  {reason}" for reason in reasons)
                + f"\nContinue with its settings and files, or use another data.prepared_dir, or delete {self.root}."
            )
        return not reasons

    def _differences_from(self, settings: dict[str, Any], files: list[SourceFile]) -> list[str]:
        try:
            key = json.loads((self.root / _KEY_FILE).read_bytes())
            if key["format"] != WORK_VERSION:
                return [f"data format: {key['format']}, this version of hlat writes {WORK_VERSION}"]
            before = [(str(path), list(content)) for path, content in key["files"]]
            return setting_differences(dict(key["settings"]), settings) + describe_corpus_changes(before, files)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return [f"{_KEY_FILE} is missing or damaged, so the earlier preparation cannot be identified"]

    def _refuse_foreign_files(self) -> None:
        foreign = [p.name for p in self.folder.iterdir() if p.name == TOKENIZER_FOLDER or p.suffix == ".bin"]
        if foreign:
            raise DataError(
                f"{self.folder}: holds {foreign[0]} but no {MANIFEST_FILE}: not complete, and not left by an "
                "interrupted run of this preparation. Use another folder (data.prepared_dir), or delete this one."
            )


_KEPT_COUNTS = ("documents", "tokens", "text_bytes")
_ROW_COUNTS = [name for name in SourceRows.model_fields if name not in ("source", "name")]


class UnitMerger:
    """Merges finished units, in order; a context manager that leaves no half-written file.

    ``position`` is the number of bytes of the corpus in the units merged so far.
    """

    def __init__(
        self, config: DataConfig, files: list[SourceFile], out: Path, dtype: str, *, consume: bool = True
    ) -> None:
        self._drop = config.duplicates == "drop"
        self._names = {source.number: source.name for source in numbered_sources(config)}
        self._next = 0
        # consume: delete token files of units once shards have their tokens. If they are kept, they may come from
        # another machine, so checksums are verified.
        self._seen, self._consume = DuplicateFinder(), consume
        # Counts of each source, by the names in SourceRows and SourceTokens.
        self._rows = {file.source: Counter(dict.fromkeys(_ROW_COUNTS, 0)) for file in files}
        self._kept = {split: {s: Counter(dict.fromkeys(_KEPT_COUNTS, 0)) for s in self._rows} for split in SPLITS}
        self._quarantine = QuarantineWriter(out, files)
        self._shards = {split: ShardWriter(out, split, config.shard_tokens, dtype, consume) for split in SPLITS}
        self._documents = {split: BoundaryWriter(out / documents_file(split)) for split in SPLITS}
        self.position = 0

    def __enter__(self) -> "UnitMerger":
        return self

    def __exit__(self, *_: object) -> None:
        for split in SPLITS:
            self._shards[split].abandon()
            self._documents[split].abandon()
        self._quarantine.abandon()

    def add_finished_units(self, folder: Path) -> int:
        """Add the next units of a folder for as long as they are finished; return the position after them."""
        while (unit := read_index(folder, self._next)) is not None:
            self.add_unit(unit, folder)
            self._next += 1
        return self.position

    def add_unit(self, unit: UnitIndex, folder: Path) -> None:
        """Add the next unit of the corpus; DataError if its files are damaged, OSError if the disk refuses."""
        # Here all units pass in the order of the corpus, so the first of equal documents is kept, on any number of
        # workers.
        copies, span = self._seen.add(unit.hashes), unit.span
        rows = self._rows[span.source]
        rows.update(rows=span.rows, null_rows=span.null_rows, empty_documents=span.empty_documents)
        rows.update(unreadable_rows=len(span.unreadable), documents=len(copies), copies=int(copies.sum()))
        for split in SPLITS:
            pieces = unit.splits[split]
            duplicate = copies[pieces.documents]
            rows["copied_tokens"] += int(pieces.lengths[duplicate].sum())
            if len(pieces.documents):
                kept = ~duplicate if self._drop else np.ones_like(duplicate)
                counts = self._kept[split][span.source]
                self._append(split, pieces, kept, counts, tokens_file(folder, span.number, split))
        self._quarantine.append(span.unreadable)
        self.position = max(self.position, span.position)

    def document_counts(self) -> dict[Split, int]:
        """Return the number of documents of each split so far, 0 if they have no tokens."""
        return {split: self._documents[split].documents if self._shards[split].position else 0 for split in SPLITS}

    def close(self) -> tuple[dict[Split, SplitRecord], list[SourceRows], QuarantineRecord | None]:
        """Finish all files; return the split records, the counts of rows, and the record of bad rows."""
        rows = [SourceRows(source=s, name=self._names[s], **counts) for s, counts in self._rows.items()]
        return {split: self._record(split) for split in SPLITS}, rows, self._quarantine.close()

    def _append(self, split: Split, pieces: SplitIndex, kept: Bools, counts: Counter[str], tokens: Path) -> None:
        self._shards[split].append(tokens, pieces.lengths, kept, pieces.sha256)
        self._documents[split].append(pieces.lengths[kept])
        lengths, text_bytes = int(pieces.lengths[kept].sum()), int(pieces.text_bytes[kept].sum())
        counts.update(documents=int(kept.sum()), tokens=lengths, text_bytes=text_bytes)

    def _record(self, split: Split) -> SplitRecord:
        kept = self._kept[split]
        return SplitRecord(
            documents=self._documents[split].documents,
            tokens=self._shards[split].position,
            text_bytes=sum(counts["text_bytes"] for counts in kept.values()),
            sources=[SourceTokens(source=s, **counts) for s, counts in kept.items() if counts["documents"]],
            shards=self._shards[split].close(),
            documents_file=documents_file(split),
            documents_sha256=self._documents[split].close(),
        )


def complete_staging(
    staging: StagingFolder, files: list[SourceFile], tokenizer: Tokenizer, merger: UnitMerger, notes: list[str]
) -> None:
    """Finish the merged files, and write the manifest, still inside the staging folder."""
    splits, rows, quarantine = merger.close()
    of_split = _split_note(staging.config, splits, rows, staging.settings.get(TAILS, []))
    notes = [*notes, *doubts(files), *_preparation_notes(staging.config, rows, quarantine), *filter(None, [of_split])]
    found = {"splits": splits, "rows": rows, "quarantine": quarantine, "notes": notes}
    complete_folder(staging.out, staging.config, staging.settings, files, tokenizer, found)


def complete_folder(
    folder: Path,
    config: DataConfig,
    settings: dict[str, object],
    files: list[SourceFile],
    tokenizer: Tokenizer,
    found: dict[str, Any],  # the other fields of the manifest
) -> None:
    """Write the manifest, which makes a folder of files prepared data."""
    dtype, sources = token_dtype(tokenizer.vocab_size), [SourceRecord.from_file(file) for file in files]
    manifest = DataManifest(
        format_version=FORMAT_VERSION,
        fingerprint=content_fingerprint(tokenizer.sha256, dtype, found["splits"], sources, found.get("blocks")),
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        tokenizer_sha256=tokenizer.sha256,
        settings=settings,
        places=recipe_locations(config),
        sources=sources,
        **found,
    )
    sync_to_disk(folder)
    # After the other files are on disk: a folder with a manifest is complete.
    write_record(folder / MANIFEST_FILE, manifest)
    sync_to_disk(folder)


def publish(staging: StagingFolder) -> None:
    """Move the result to the output folder; after an interruption, the next run moves the rest."""
    names = sorted(path.name for path in staging.out.iterdir() if path.suffix != CHECKSUM_SUFFIX)
    # The manifest last: it makes the folder prepared data.
    for name in [*(name for name in names if name != MANIFEST_FILE), MANIFEST_FILE]:
        (staging.out / name).rename(staging.folder / name)
    sync_to_disk(staging.folder)
    shutil.rmtree(staging.root)


def _split_note(config: DataConfig, splits: dict[Split, SplitRecord], rows: list[SourceRows], tails: list[int]) -> str:
    """Return the sentence about sources of few documents; empty if none is to be named."""
    validation, sources = config.validation, [row.source for row in rows if row.source >= 0]
    if validation.by == "auto":
        return describe_tails(len(tails), len(sources), validation.fraction)
    if validation.path is not None or not validation.fraction or validation.by == "tail":
        return ""
    labels = {source.number: source.name or source.path for source in numbered_sources(config)}
    train, aside = ({each.source: each for each in splits[split].sources} for split in SPLITS)
    held = []
    for source in sources:
        kept = (aside[source].documents, aside[source].tokens) if source in aside else (0, 0)
        trained = train[source].tokens if source in train else 0
        held.append(HeldOut(labels[source], *kept, kept[1] + trained))
    return describe_scarce(held, validation.fraction)


def _preparation_notes(config: DataConfig, rows: list[SourceRows], quarantine: QuarantineRecord | None) -> list[str]:
    """Return notes for the user about null rows, bad rows and duplicates, one sentence each."""
    notes = []
    if nulls := sum(source.null_rows for source in rows):
        outcome = "holds no text (null) and was" if nulls == 1 else "hold no text (null) and were"
        notes.append(f"{plural(nulls, 'row')} {outcome} left out.")
    if quarantine is not None:
        total = sum(source.rows for source in rows)
        notes.append(
            f"{quarantine.rows} of {total} rows could not be read and were left out: {quarantine.file} lists them."
        )
    if copies := sum(source.copies for source in rows):
        documents = sum(source.documents for source in rows)
        outcome = "were left out" if config.duplicates == "drop" else "are kept; data.duplicates=drop leaves them out"
        notes.append(f"{copies} of {documents} documents are exact copies of earlier ones and {outcome}.")
    return notes
