"""Prepare a corpus: raw text -> token shards and a manifest; it can be interrupted and resumed at any moment.

    files --hash--> key of this preparation --> <dir>/partial/ with the same key, or a new one
    documents --sample--> tokenizer                                    (unless the recipe gives one)
    documents --work units--> worker processes --> partial/units/       (a finished unit is never redone)
    units, in order --> shards, document boundaries, manifest           (in partial/out/)
    partial/out/* --rename--> <dir>/*, the manifest last

The order of the work differs from run to run, the result does not: it is byte for byte the same for any number of
workers and any interruptions. hlat.data.prepare.partitions prepares one partition of a corpus, up to its units.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from hlat.config import DataConfig
from hlat.data.corpus_files import CACHE_FOLDER, hash_files, list_files
from hlat.data.prepare.corpus import (
    Corpus,
    ProgressCallback,
    SourceTails,
    SplitPlan,
    make_tokenizer,
    plan_split,
    refuse_empty_split,
    short_sources,
    tails_setting,
    unfinished_units,
    vocabulary_of_given_tokenizer,
)
from hlat.data.prepare.staging import (
    PARTIAL,
    StagingFolder,
    UnitMerger,
    complete_staging,
    load_hashes,
    publish,
    update_hashes,
)
from hlat.data.prepare.work_units import read_index
from hlat.data.prepare.worker import WorkerPool
from hlat.data.prepared.consistency import recipe_locations
from hlat.data.prepared.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, DataManifest, read_data_manifest
from hlat.data.prepared.prepared_folder import PreparedData, check_settings, current_settings, open_prepared
from hlat.data.prepared.shards import token_dtype
from hlat.data.source_listing import SourceNotFoundError, check_first_bytes
from hlat.data.stores.local_files import convert_disk_errors
from hlat.data.stores.remote import local_path
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import broken_link

_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS = 1 << 20, 1 << 25, 1 << 12


def prepare(
    config: DataConfig, out_dir: str | Path, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> PreparedData:
    """Tokenize a corpus into memory-mapped shards with a manifest; return at once if that is done already.

    A call after a killed one, with the same corpus and settings, resumes; the result is byte for byte that of an
    uninterrupted call. Finished data of these settings and paths is used when the corpus can no longer be listed;
    ``notes`` say so. ``workers`` None uses data.workers, or one process per core.

    Raises:
        DataError: the corpus or tokenizer cannot be used, more rows are unreadable than data.unreadable_rows allows, or
            the folder holds data of other settings or of another corpus.
        StorageError: a file cannot be read or written.
    """
    folder = resolve_output_folder(out_dir)
    report = progress or ignore_progress
    manifest = read_data_manifest(folder)
    try:
        files = list_files(config, folder)
    except SourceNotFoundError as error:
        if manifest is None:
            raise
        return _open_without_corpus(config, folder, manifest, error)
    settings = current_settings(folder, manifest, config)  # refuses an unusable tokenizer before anything is written
    if manifest is None:
        check_first_bytes(files, config.unreadable_rows)
    # Wait for the lock if the data is finished: other processes then hold it only briefly, to check the same.
    with locked_folder(folder, wait=manifest is not None):
        manifest = read_data_manifest(folder)  # again: another process may have finished in the meantime
        known = load_hashes(folder if manifest else folder / PARTIAL, manifest)
        files = hash_files(files, known, partial(report, "hash"))
        if manifest is not None:
            check_settings(folder, manifest, config, files)
            update_hashes(folder, files, known)
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
            return open_prepared(folder)
        corpus = Corpus(files, range(len(files)), config.unreadable_rows, vocabulary_of_given_tokenizer(config))
        short = short_sources(config, corpus)
        settings |= tails_setting(short)  # part of the identity of unfinished work too
        staging = StagingFolder(folder, config, settings, report, workers or config.workers)
        staging.claim(files)
        if not (staging.out / MANIFEST_FILE).exists():
            _build(staging, corpus, short)
        publish(staging)  # also where an earlier run was interrupted after its manifest was written
        # This cache belongs to the folder alone; data.cache_dir is for sharing.
        shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
    return open_prepared(folder, config)


def resolve_output_folder(out_dir: str | Path, chosen_by: str = "data.prepared_dir") -> Path:  # chosen_by: for messages
    """Return the output folder, which need not exist; DataError if a parent is a file or a dead link."""
    folder = Path(local_path(out_dir))
    with convert_disk_errors(folder, chosen_by):
        existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
        if link := broken_link(folder):
            raise DataError(f"{chosen_by} {folder}: {link}. Make that folder, mount its disk, or name another.")
    if existing is not None and not existing.is_dir():
        raise DataError(f"{chosen_by} {folder}: {existing} is a file, so no data can be put there. Name a folder.")
    return folder


def _open_without_corpus(
    config: DataConfig, folder: Path, manifest: DataManifest, error: SourceNotFoundError
) -> PreparedData:
    """Open finished data whose corpus is gone: a cluster need not store the raw text."""
    recorded = manifest.places["corpus"]
    # A mistyped path must not go unnoticed.
    if recorded != recipe_locations(config)["corpus"]:
        raise DataError(
            f"{error} {folder} holds data prepared from another path. To use that data, set in the recipe: "
            f"{' '.join(recorded)}"
        ) from error
    note = f"{error} So the corpus was not compared: the finished data in {folder} is used without it."
    return replace(open_prepared(folder, config), opening_notes=(note,))


def _build(staging: StagingFolder, corpus: Corpus, short: SourceTails) -> None:
    config, files = staging.config, corpus.files
    plan = plan_split(config, corpus, short, staging.report)
    tokenizer, notes = make_tokenizer(config, corpus, plan, staging.out / TOKENIZER_FOLDER, staging.report)
    dtype = token_dtype(tokenizer.vocab_size)
    with UnitMerger(config, files, staging.out, dtype) as merger:
        tokenize_units(staging, corpus, plan, dtype, partial(merger.add_finished_units, staging.units))
        refuse_empty_split(config, corpus, merger.document_counts(), undo=f", after deleting {staging.root}")
        complete_staging(staging, files, tokenizer, merger, notes)


def tokenize_units(
    staging: StagingFolder, corpus: Corpus, plan: SplitPlan, dtype: str, on_finished: Callable[[], int]
) -> None:
    """Tokenize all units that are not finished yet.

    ``on_finished`` is called after units have been finished, and once before and after all; it returns the bytes done.
    """
    pending = unfinished_units(
        corpus,
        plan,
        min(max(corpus.bytes // _UNITS, _SMALLEST_UNIT), _LARGEST_UNIT),
        partial(read_index, staging.units),
    )
    with WorkerPool(staging.workers or _cores(), staging.out / TOKENIZER_FOLDER, staging.units, dtype) as pool:
        staging.report("tokenize", on_finished(), corpus.bytes)
        for _ in pool.run(pending):
            staging.report("tokenize", on_finished(), corpus.bytes)
    on_finished()
    staging.report("tokenize", corpus.bytes, corpus.bytes)


def _cores() -> int:
    # A container may allow fewer than the machine has; macOS has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Do nothing with a progress report, where the caller passes no callback."""


@contextmanager
def locked_folder(folder: Path, wait: bool) -> Iterator[None]:
    """Make an output folder and hold an exclusive lock on it; convert errors of its disk.

    DataError if another process has the lock, unless ``wait``.
    """
    with convert_disk_errors(folder), ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            # The operating system releases the lock when the process ends, in whatever way.
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise DataError(
                f"{folder}: another process is preparing data in this folder. Wait for it to end."
            ) from error
        yield
