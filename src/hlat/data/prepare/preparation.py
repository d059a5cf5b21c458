"""Raw text -> prepared data, restartable at any moment.

    files --fingerprint--> key of this preparation --> <dir>/partial/ of this key, or a new one
    documents --sample--> tokenizer                                    (unless one is given)
    documents --units--> worker processes --> partial/units/            (a finished unit is never redone)
    units, in order --> shards, document boundaries, manifest           (in partial/out/)
    partial/out/* --rename--> <dir>/*, the manifest last

What is done when differs from run to run; what comes out does not: the same bytes for any number of workers and any
interruptions. hlat.data.prepare.partition prepares a part of a corpus in the same way, up to its units.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from hlat.config.sections import DataConfig
from hlat.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    DataManifest,
    load_hashes,
    read_manifest,
    recipe_locations,
    update_hashes,
)
from hlat.data.prepare.corpus import Corpus, SplitPlan, units
from hlat.data.prepare.merge_units import UnitMerger
from hlat.data.prepare.pool import WorkerPool
from hlat.data.prepare.publish import complete_staging, publish
from hlat.data.prepare.staging import PARTIAL, StagingFolder
from hlat.data.prepare.tokenizer_and_split import (
    ProgressCallback,
    make_tokenizer,
    plan_split,
    refuse_empty_split,
    vocabulary_of_given_tokenizer,
)
from hlat.data.prepare.work_units import read_index
from hlat.data.prepared import PreparedData, check_settings, current_settings, open_prepared, token_dtype
from hlat.data.sources import (
    CACHE_FOLDER,
    SourceFile,
    SourceNotFoundError,
    describe_corpus_changes,
    hash_files,
    list_files,
)
from hlat.data.stores import convert_disk_errors
from hlat.runtime import DataError

_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS = 1 << 20, 1 << 25, 1 << 12


def prepare(
    config: DataConfig, out_dir: str | Path, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> PreparedData:
    """Tokenize a corpus into memory-mapped shards with a manifest; returns at once if that is done already.

    Killed at any moment and called again with the same corpus and settings, it goes on where it was, and the result
    is byte for byte that of a call that was never interrupted. Finished data prepared with these settings from these
    paths is taken as it is where there is nothing at them any more; ``notes`` say so.

    Args:
        config: the data section.
        out_dir: the folder of the result; while working, its subfolder ``partial`` holds what is done so far.
        workers: processes that tokenize; None for data.workers, and for that one per core.
        progress: see Progress.

    Raises:
        DataError: a corpus or tokenizer that cannot be used, more unreadable rows than data.unreadable_rows allows, or
            a folder that holds data prepared otherwise.
        StorageError: the disk refused.
    """
    folder = resolve_output_folder(out_dir)
    report = progress or ignore_progress
    manifest = read_manifest(folder)
    try:
        files = list_files(config, folder)
    except SourceNotFoundError as error:
        if manifest is None:
            raise
        return _open_without_corpus(config, folder, manifest, error)
    settings = current_settings(folder, manifest, config)  # refuses an unusable tokenizer before anything is written
    with convert_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Where the work is done already, others have the lock only to see that too: several runs may start at once.
        with folder_lock(folder, wait=manifest is not None):
            manifest = read_manifest(folder)  # again: another process may have finished in the meantime
            known = load_hashes(folder if manifest else folder / PARTIAL, manifest)
            files = hash_files(files, known, partial(report, "hash"))
            if manifest is not None:
                before = [(record.path, record.content) for record in manifest.sources]
                check_settings(folder, manifest, config, describe_corpus_changes(before, files))
                update_hashes(folder, files, known)
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
                shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
                return open_prepared(folder)
            staging = StagingFolder(folder)
            staging.claim(settings, files)
            if not (staging.out / MANIFEST_FILE).exists():
                _build(config, files, settings, staging, workers, report)
            publish(staging)
            shutil.rmtree(
                folder / CACHE_FOLDER, ignore_errors=True
            )  # nobody else has it; data.cache_dir is for sharing
    return open_prepared(folder, config)


def resolve_output_folder(out_dir: str | Path, chosen_by: str = "data.prepared_dir") -> Path:
    """A folder where data can be put, there or not.

    Raises:
        DataError: it is a file, or below one.
        StorageError: it cannot be looked at.
    """
    folder = Path(out_dir).expanduser()
    with convert_disk_errors(folder, chosen_by):
        there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if there is not None and not there.is_dir():
        raise DataError(f"{chosen_by} {folder}: {there} is a file, so no data can be put there. Name a folder.")
    return folder


def _open_without_corpus(
    config: DataConfig, folder: Path, manifest: DataManifest, error: SourceNotFoundError
) -> PreparedData:
    """Finished data stands on its own where its corpus has gone: a cluster need not hold the raw text.

    Only for the very paths that the data was made from: a mistyped path is a mistake.
    """
    then = manifest.places["corpus"]
    if then != recipe_locations(config)["corpus"]:
        raise DataError(
            f"{error} {folder} holds data that was prepared from another path: to use it as it is, give the recipe "
            f"{' '.join(then)}"
        ) from error
    prepared = open_prepared(folder, config)
    notes = [*manifest.notes, f"{error} The corpus is not found: the finished data in {folder} is taken as it is."]
    return replace(prepared, manifest=manifest.model_copy(update={"notes": notes}))


def _build(
    config: DataConfig,
    files: list[SourceFile],
    settings: dict[str, object],
    staging: StagingFolder,
    workers: int | None,
    progress: ProgressCallback,
) -> None:
    """Make all of the result, in the staging folder."""
    corpus = Corpus(files, range(len(files)), config.unreadable_rows, vocabulary_of_given_tokenizer(config))
    plan = plan_split(config, corpus, staging.characters, progress)
    tokenizer, notes = make_tokenizer(config, corpus, plan, staging.out / TOKENIZER_FOLDER, progress)
    dtype = token_dtype(tokenizer.vocab_size)
    with UnitMerger(config, files, staging.out, dtype) as merge:

        def take() -> int:
            merge.add_finished_units(staging.units)
            return merge.position

        tokenize_units(corpus, plan, staging, dtype, workers or config.workers, progress, take)
        refuse_empty_split(config, corpus, merge.document_counts(), undo=f", after deleting {staging.root}")
        complete_staging(staging, config, settings, files, tokenizer, merge, notes)


def tokenize_units(
    corpus: Corpus,
    plan: SplitPlan,
    staging: StagingFolder,
    dtype: str,
    workers: int | None,
    progress: ProgressCallback,
    take: Callable[[], int],
) -> None:
    """Make all units of a stretch of the corpus that are not finished yet.

    Args:
        corpus: with the stretch.
        plan: how it is split.
        staging: where the units go and where the tokenizer is.
        dtype: of the tokens.
        workers: processes that tokenize; None for one per core.
        progress: see Progress.
        take: called whenever units have been finished, and once before and after; returns the bytes of the stretch
            that are done.
    """
    pending = units(corpus, plan, _choose_unit_bytes(corpus.bytes), partial(read_index, staging.units))
    with WorkerPool(workers or _cores(), staging.out / TOKENIZER_FOLDER, staging.units, dtype) as pool:
        progress("tokenize", take(), corpus.bytes)
        for _ in pool.run(pending):
            progress("tokenize", take(), corpus.bytes)
    take()
    progress("tokenize", corpus.bytes, corpus.bytes)


def _choose_unit_bytes(total: int) -> int:
    return min(max(total // _UNITS, _SMALLEST_UNIT), _LARGEST_UNIT)


def _cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
    del stage, done, total


@contextmanager
def folder_lock(folder: Path, wait: bool) -> Iterator[None]:
    """Only one preparation at a time works in a folder; the lock goes with the process, however it ends."""
    with ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is preparing data here. Wait for it to end.") from error
        yield
