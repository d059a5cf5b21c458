"""Complete a preparation: staging folder -> prepared data in the output folder, the manifest last."""

import shutil

from hlat.config import DataConfig
from hlat.data.manifest.manifest import (
    MANIFEST_FILE,
    DataManifest,
    QuarantineRecord,
    SourceRecord,
    SourceRows,
    content_fingerprint,
)
from hlat.data.manifest.manifest_file import write_data_manifest
from hlat.data.manifest.record_formats import FORMAT_VERSION
from hlat.data.manifest.settings import recipe_locations
from hlat.data.prepare.merge_units import UnitMerger
from hlat.data.prepare.staging import StagingFolder
from hlat.data.prepared.shards import CHECKSUM_SUFFIX, token_dtype
from hlat.data.sources.findings import doubts
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores.atomic_files import sync_folder
from hlat.data.tokenizers.base import Tokenizer
from hlat.runtime.terminal_text import plural


def complete_staging(
    staging: StagingFolder,
    config: DataConfig,
    settings: dict[str, object],
    files: list[SourceFile],
    tokenizer: Tokenizer,
    merger: UnitMerger,
    notes: list[str],
) -> None:
    """Finish the merged files, and write the manifest, still inside the staging folder.

    Args:
        staging: the staging folder.
        config: the data section.
        settings: the settings that decide the content.
        files: the files of the corpus.
        tokenizer: the tokenizer of the tokens.
        merger: the merger that has received all units.
        notes: notes for the user about the preparation so far.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    splits, rows, quarantine = merger.close()
    manifest = DataManifest(
        format_version=FORMAT_VERSION,
        fingerprint=content_fingerprint(tokenizer.sha256, dtype, splits),
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        tokenizer_sha256=tokenizer.sha256,
        splits=splits,
        rows=rows,
        quarantine=quarantine,
        notes=[*notes, *doubts(files), *_notes(config, rows, quarantine)],
        settings=settings,
        places=recipe_locations(config),
        sources=[SourceRecord.from_file(file) for file in files],
    )
    sync_folder(staging.out)
    write_data_manifest(staging.out, manifest)
    sync_folder(staging.out)


def publish(staging: StagingFolder) -> None:
    """Move the result to the output folder; after an interruption, the next run moves the rest."""
    names = sorted(path.name for path in staging.out.iterdir() if path.suffix != CHECKSUM_SUFFIX)
    for name in [*(name for name in names if name != MANIFEST_FILE), MANIFEST_FILE]:
        (staging.out / name).rename(staging.folder / name)
    sync_folder(staging.folder)
    shutil.rmtree(staging.root)


def _notes(config: DataConfig, rows: list[SourceRows], quarantine: QuarantineRecord | None) -> list[str]:
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
