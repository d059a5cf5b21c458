"""Raw text -> prepared data, restartable at any moment.

    files --fingerprint--> key of this preparation --> <dir>/partial/ of this key, or a new one
    documents --sample--> tokenizer                                    (unless one is given)
    documents --units--> worker processes --> partial/units/            (a finished unit is never redone)
    units, in order --> shards, document boundaries, manifest           (in partial/out/)
    partial/out/* --rename--> <dir>/*, the manifest last

What is done when differs from run to run; what comes out does not: the same bytes for any number of workers and any
interruptions.
"""

import fcntl
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from hlat.config import DataConfig
from hlat.data.corpus import SplitPlan, texts_of, units, watched
from hlat.data.hashes import known_hashes, remember_touched
from hlat.data.merge import Merge
from hlat.data.pool import WorkerPool
from hlat.data.prepared import (
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Prepared,
    SourceRecord,
    content_fingerprint,
    open_prepared,
    read_manifest,
    refuse_other_settings,
    settings_beside,
)
from hlat.data.settings import places_of
from hlat.data.shards import CHECKSUM, token_dtype
from hlat.data.sources import CACHE, NothingThere, SourceFile, corpus_changes, fingerprint, list_files
from hlat.data.split import SPLITS, Split, tail_start
from hlat.data.staging import PARTIAL, Staging
from hlat.data.storage import storing, sync_folder, write_whole
from hlat.data.tokenizer import Tokenizer, load_saved, load_tokenizer
from hlat.data.tokenizer_training import sample, train_bpe, train_char
from hlat.data.units import read_index
from hlat.runtime import DataError

Progress = Callable[[str, int, int], None]
"""Called with the stage ("hash", "measure", "sample" or "tokenize"), bytes of the files done, and bytes in all."""

_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS = 1 << 20, 1 << 25, 1 << 12


def prepare(
    config: DataConfig, out_dir: str | Path, *, workers: int | None = None, progress: Progress | None = None
) -> Prepared:
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
        DataError: a corpus or tokenizer that cannot be used, or a folder that holds data prepared otherwise.
        StorageError: the disk refused.
    """
    folder = _checked_folder(out_dir)
    report = progress or _silent
    manifest = read_manifest(folder)
    try:
        files = list_files(config, folder)
    except NothingThere as error:
        if manifest is None:
            raise
        return _finished_without_corpus(config, folder, manifest, error)
    settings = settings_beside(folder, manifest, config)  # refuses an unusable tokenizer before anything is written
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Where the work is done already, others have the lock only to see that too: several runs may start at once.
        with _locked(folder, wait=manifest is not None):
            manifest = read_manifest(folder)  # again: another process may have finished in the meantime
            known = known_hashes(folder if manifest else folder / PARTIAL, manifest)
            files = fingerprint(files, known, partial(report, "hash"))
            if manifest is not None:
                before = [(record.path, record.content) for record in manifest.sources]
                refuse_other_settings(folder, manifest, config, corpus_changes(before, files))
                remember_touched(folder, files, known)
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
                shutil.rmtree(folder / CACHE, ignore_errors=True)
                return open_prepared(folder)
            count = workers or config.workers or _cores()
            _Preparation(config, folder, files, settings, count, report).run()
            shutil.rmtree(folder / CACHE, ignore_errors=True)  # nobody else has it; data.cache_dir is for sharing
    return open_prepared(folder, config)


def _checked_folder(out_dir: str | Path) -> Path:
    folder = Path(out_dir).expanduser()
    with storing(folder):
        there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if there is not None and not there.is_dir():
        raise DataError(f"data.prepared_dir {folder}: {there} is a file, so no data can be put there. Name a folder.")
    return folder


def _finished_without_corpus(config: DataConfig, folder: Path, manifest: Manifest, error: NothingThere) -> Prepared:
    """Finished data stands on its own where its corpus has gone: a cluster need not hold the raw text.

    Only for the very paths that the data was made from: a mistyped path is a mistake.
    """
    then = manifest.places["corpus"]
    if then != places_of(config)["corpus"]:
        raise DataError(
            f"{error} {folder} holds data that was prepared from another path: to use it as it is, give the recipe "
            f"{' '.join(then)}"
        ) from error
    prepared = open_prepared(folder, config)
    notes = [*manifest.notes, f"{error} The corpus is not found: the finished data in {folder} is taken as it is."]
    return replace(prepared, manifest=manifest.model_copy(update={"notes": notes}))


class _Preparation:
    """One preparation, from fingerprinted files to the finished folder."""

    def __init__(
        self,
        config: DataConfig,
        folder: Path,
        files: list[SourceFile],
        settings: dict[str, object],
        workers: int,
        progress: Progress,
    ) -> None:
        self.config, self.folder, self.files, self.settings = config, folder, files, settings
        self.workers, self.progress = workers, progress
        self.staging = Staging(folder)
        self.units, self.out = self.staging.units, self.staging.out

    def run(self) -> None:
        """Do what is not done yet."""
        self.staging.claim(self.settings, self.files)
        if not (self.out / MANIFEST).exists():
            self._make()
        self._publish()

    # --- making ----------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        plan = self._split_plan()
        tokenizer, notes = self._tokenizer(plan)
        dtype = token_dtype(tokenizer.vocab_size)
        total = sum(file.size for file in self.files)
        unit_bytes = min(max(total // _UNITS, _SMALLEST_UNIT), _LARGEST_UNIT)
        pending = units(self.files, plan, unit_bytes, partial(read_index, self.units))
        with Merge(self.units, self.out, self.config.shard_tokens, dtype) as merge:
            pool = WorkerPool(self.workers, self.out / TOKENIZER, self.units, dtype)
            with pool:
                merge.take_finished()
                self.progress("tokenize", merge.position, total)
                for _ in pool.run(pending):
                    merge.take_finished()
                    self.progress("tokenize", merge.position, total)
            merge.take_finished()
            self.progress("tokenize", total, total)
            dealt = {s: merge.documents[s].documents if merge.shards[s].position else 0 for s in SPLITS}
            self._refuse_nothing(dealt, undo=f", after deleting {self.staging.root}")
            manifest = self._manifest(tokenizer, dtype, merge, notes)
        sync_folder(self.out)
        write_whole(self.out / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())
        sync_folder(self.out)

    def _split_plan(self) -> SplitPlan:
        validation = self.config.validation
        if validation.path is not None or validation.fraction == 0:
            return SplitPlan(0.0, None)
        if validation.by == "document":
            return SplitPlan(validation.fraction, None)
        stored = self.staging.root / "tails.json"
        if not stored.exists():
            counts = self._characters()
            tails = {source: tail_start(count, validation.fraction) for source, count in counts.items()}
            write_whole(stored, json.dumps(tails).encode())
        return SplitPlan(0.0, {int(source): start for source, start in json.loads(stored.read_bytes()).items()})

    def _characters(self) -> dict[int, int]:
        """Characters of every source."""
        counts: dict[int, int] = defaultdict(int, {file.source: 0 for file in self.files})
        for document in watched(self.files, partial(self.progress, "measure")):
            counts[self.files[document.file].source] += len(document.text or "")
        return counts

    def _tokenizer(self, plan: SplitPlan) -> tuple[Tokenizer, list[str]]:
        """The tokenizer, given, trained, or left trained by an interrupted run; and what to tell of it."""
        asked = self.config.tokenizer
        folder = self.out / TOKENIZER
        if asked.path is not None:
            tokenizer = load_tokenizer(asked.path, asked.eos_token)
            tokenizer.save(folder)
            return tokenizer, []
        if not folder.exists():
            making = self.staging.root / "tokenizer.tmp"
            shutil.rmtree(making, ignore_errors=True)
            self._train(plan).save(making)
            making.rename(folder)
        tokenizer = load_saved(folder)
        if asked.train == "bpe" and tokenizer.vocab_size < asked.vocab_size:
            return tokenizer, [
                f"The corpus is too small for data.tokenizer.vocab_size = {asked.vocab_size}: "
                f"the tokenizer has {tokenizer.vocab_size} tokens."
            ]
        return tokenizer, []

    def _train(self, plan: SplitPlan) -> Tokenizer:
        asked = self.config.tokenizer
        dealt: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        texts = self._texts(plan, dealt)
        if asked.train == "char":
            alphabet: set[str] = set()
            for _, text in texts:
                alphabet.update(text)
            self._refuse_nothing(dealt)
            return train_char(alphabet, asked.eos_token)
        chosen = sample((text for split, text in texts if split == "train"), asked.train_bytes)
        self._refuse_nothing(dealt)
        return train_bpe(chosen, asked.vocab_size, asked.eos_token)

    def _texts(self, plan: SplitPlan, dealt: dict[Split, int]) -> Iterator[tuple[Split, str]]:
        """All texts and where they go, counted on the way."""
        for split, text in texts_of(self.files, plan, partial(self.progress, "sample")):
            dealt[split] += 1
            yield split, text

    # --- finishing -------------------------------------------------------------------------------------------------

    def _refuse_nothing(self, dealt: dict[Split, int], undo: str = "") -> None:
        """Raise DataError if a split that is wanted has no text, as soon as that is known.

        Args:
            dealt: documents of each split.
            undo: what has to be done first to prepare with other settings.
        """
        if dealt["train"] == 0:
            raise DataError(f"{self.files[0].path}{_and_others(self.files)}: no text for training: {_WHY_NO_TEXT}")
        validation = self.config.validation
        if dealt["validation"] > 0 or (validation.path is None and validation.fraction == 0):
            return
        if validation.path is not None:
            raise DataError(f"data.validation.path {validation.path}: every document in it is null or empty.")
        tail = "" if validation.by == "tail" else "data.validation.by=tail, which cuts inside a document, "
        raise DataError(
            f"data.validation: none of the {dealt['train']} documents fell to the validation split. Use {tail}"
            f"a larger data.validation.fraction, or data.validation.fraction=0 for no validation{undo}."
        )

    def _manifest(self, tokenizer: Tokenizer, dtype: str, merge: Merge, notes: list[str]) -> Manifest:
        splits = merge.close()
        if merge.null_rows:
            notes = [*notes, f"{merge.null_rows} rows hold no text (null) and were left out."]
        return Manifest.model_validate(
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": content_fingerprint(tokenizer.sha256, dtype, splits),
                "dtype": dtype,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "bos_id": tokenizer.bos_id,
                "tokenizer_sha256": tokenizer.sha256,
                "splits": splits,
                "null_rows": merge.null_rows,
                "empty_documents": merge.empty_documents,
                "notes": notes,
                "settings": self.settings,
                "places": places_of(self.config),
                "sources": _sources(self.files),
            }
        )

    def _publish(self) -> None:
        """Move the result to its place; killed in between, the next run goes on moving."""
        names = sorted(path.name for path in self.out.iterdir() if path.suffix != CHECKSUM)
        for name in [*(name for name in names if name != MANIFEST), MANIFEST]:
            (self.out / name).rename(self.folder / name)
        sync_folder(self.folder)
        shutil.rmtree(self.staging.root)


_WHY_NO_TEXT = (
    "every document is null, empty, or validation text. Check data.path and data.text_column; a corpus of few "
    "documents takes data.validation.by=tail."
)


def _cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _silent(stage: str, done: int, total: int) -> None:
    del stage, done, total


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Only one preparation at a time works in a folder; the lock goes with the process, however it ends."""
    with ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is preparing data here. Wait for it to end.") from error
        yield


def _sources(files: list[SourceFile]) -> list[SourceRecord]:
    return [
        SourceRecord(
            path=file.path,
            use="validation" if file.is_validation else "split",
            content=file.content,
            bytes=file.size,
            mtime_ns=file.mtime_ns,
            sha256=file.sha256,
            etag=file.etag,
        )
        for file in files
    ]


def _and_others(files: list[SourceFile]) -> str:
    return f" and {len(files) - 1} more" if len(files) > 1 else ""
