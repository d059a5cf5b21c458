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
from typing import Any

from hlat.config import DataConfig
from hlat.data.corpus import SplitPlan, texts_of, units, watched
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
)
from hlat.data.settings import differences, places_of, settings_of
from hlat.data.shards import CHECKSUM, token_dtype
from hlat.data.sources import NothingThere, SourceFile, fingerprint, list_files
from hlat.data.split import tail_start
from hlat.data.storage import storing, sync_folder, write_whole
from hlat.data.tokenizer import Tokenizer, load_saved, load_tokenizer
from hlat.data.tokenizer_training import sample, train_bpe, train_char
from hlat.data.units import read_index
from hlat.runtime import DataError

Progress = Callable[[str, int, int], None]
"""Called with the stage ("hash", "measure", "sample" or "tokenize"), bytes of the files done, and bytes in all."""

PARTIAL = "partial"
_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS = 1 << 20, 1 << 25, 1 << 12


def prepare(
    config: DataConfig, out_dir: str | Path, *, workers: int | None = None, progress: Progress | None = None
) -> Prepared:
    """Tokenize a corpus into memory-mapped shards with a manifest; returns at once if that is done already.

    Killed at any moment and called again with the same corpus and settings, it goes on where it was, and the result
    is byte for byte that of a call that was never interrupted. Where the corpus is no longer there, finished data
    prepared with these settings is taken as it is.

    Args:
        config: the data section.
        out_dir: the folder of the result; while working, its subfolder ``partial`` holds what is done so far.
        workers: processes that tokenize; None for data.workers, and for that one per core.
        progress: see Progress.

    Raises:
        DataError: a corpus or tokenizer that cannot be used, or a folder that holds data prepared otherwise.
        StorageError: the disk refused.
    """
    folder = Path(out_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise DataError(f"data.prepared_dir {folder}: is a file. Name a folder.")
    report = progress or _silent
    try:
        files = list_files(config)
        settings = settings_of(config)  # also refuses an unusable tokenizer before anything is written
    except DataError as error:
        finished = _finished_without_sources(config, folder, error)
        if finished is None:
            raise
        return finished
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            files = fingerprint(files, _known_hashes(folder), partial(report, "hash"))
            manifest = read_manifest(folder)
            if manifest is not None:
                refuse_other_settings(folder, manifest, config, _other_files(manifest, files))
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
                return open_prepared(folder)
            count = workers or config.workers or _cores()
            _Preparation(config, folder, files, settings, count, report).run()
    return open_prepared(folder, config)


def _finished_without_sources(config: DataConfig, folder: Path, error: DataError) -> Prepared | None:
    """Finished data stands on its own where what it was made from has gone: a cluster need not hold the raw text.

    Only for the very places that the data was made from: a mistyped path is a mistake.
    """
    tokenizer = config.tokenizer.path
    gone = isinstance(error, NothingThere) or (tokenizer is not None and not Path(tokenizer).expanduser().exists())
    manifest = read_manifest(folder) if gone else None
    if manifest is None:
        return None
    if manifest.places != places_of(config):
        raise DataError(f"{error} The data in {folder} was prepared from another path.") from error
    prepared = open_prepared(folder, config)
    notes = [*manifest.notes, f"{error} The data prepared from it is there and is used as it is."]
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
        self.staging = folder / PARTIAL
        self.units, self.out = self.staging / "units", self.staging / "out"

    def run(self) -> None:
        """Do what is not done yet."""
        self._claim_staging()
        if not (self.out / MANIFEST).exists():
            self._make()
        self._publish()

    def _claim_staging(self) -> None:
        """Keep what an interrupted run of the same preparation left; refuse to throw away what another one did."""
        content = {
            "format": FORMAT_VERSION,
            "settings": self.settings,
            "files": {str(file.path): file.content for file in self.files},
        }
        key_file = self.staging / "key.json"
        if self._left_by_another(key_file, content):
            key_file.unlink(missing_ok=True)  # first: what is half removed must not be taken for unfinished work
            shutil.rmtree(self.staging, ignore_errors=True)
            self._refuse_strangers()
        self.units.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(exist_ok=True)
        for leftover in [*self.units.glob("*.tmp"), *self.out.glob("*.tmp")]:
            leftover.unlink()
        write_whole(self.staging / "sources.json", _sources_json(self.files))
        write_whole(key_file, json.dumps(content).encode())

    def _left_by_another(self, key_file: Path, content: dict[str, Any]) -> bool:
        """Whether what lies in the staging folder, if anything, is of no use; of work that is done, that is an error.

        Raises:
            DataError: finished units of another preparation, which may have taken days.
        """
        try:
            before = json.loads(key_file.read_bytes())
            old_files, old_settings = before["files"], before["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return True
        # by content, in order: a corpus may have been moved
        same_files = list(old_files.values()) == list(content["files"].values())
        if before["format"] == content["format"] and old_settings == content["settings"] and same_files:
            return False
        if any(self.units.glob("*")):
            changed = differences(old_settings, content["settings"])
            changed += [] if same_files else [_changed_corpus(old_files, content["files"])]
            raise DataError(
                f"{self.staging}: holds the finished work of an interrupted preparation that was another one:"
                + "".join(f"\n  {reason}" for reason in changed)
                + f"\nGo on with what it was started with, or give another data.prepared_dir, or delete {self.staging}."
            )
        return True

    def _refuse_strangers(self) -> None:
        strangers = [p.name for p in self.folder.iterdir() if p.name == TOKENIZER or p.suffix == ".bin"]
        if strangers:
            raise DataError(
                f"{self.folder}: holds {strangers[0]} but no {MANIFEST}: not complete, and not left by an "
                "interrupted run of this preparation. Give another folder with data.prepared_dir, or delete this one."
            )

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
            self._refuse_empty(merge)
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
        stored = self.staging / "tails.json"
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
            making = self.staging / "tokenizer.tmp"
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
        report = partial(self.progress, "sample")
        if asked.train == "char":
            alphabet: set[str] = set()
            for text in texts_of(self.files, plan, report, only_train=False):
                alphabet.update(text)
            self._refuse_no_text(bool(alphabet))
            return train_char(alphabet, asked.eos_token)
        texts = sample(texts_of(self.files, plan, report, only_train=True), asked.train_bytes)
        self._refuse_no_text(bool(texts))
        return train_bpe(texts, asked.vocab_size, asked.eos_token)

    # --- finishing -------------------------------------------------------------------------------------------------

    def _refuse_no_text(self, found: bool) -> None:
        if not found:
            raise DataError(f"{self.files[0].path}{_and_others(self.files)}: no text for training: {_WHY_NO_TEXT}")

    def _refuse_empty(self, merge: Merge) -> None:
        self._refuse_no_text(merge.shards["train"].position > 0)
        validation = self.config.validation
        wanted = validation.path is not None or validation.fraction > 0
        if wanted and merge.shards["validation"].position == 0:
            documents = merge.documents["train"].documents
            raise DataError(
                f"data.validation: none of the {documents} documents fell to the validation split. Use "
                "data.validation.by=tail, a larger data.validation.fraction, or data.validation.fraction=0 for none, "
                f"after deleting {self.staging}."
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
        shutil.rmtree(self.staging)


_WHY_NO_TEXT = "every document is null, empty, or validation text. Check data.path and data.text_column."


def _cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _silent(stage: str, done: int, total: int) -> None:
    del stage, done, total


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one preparation at a time works in a folder; the lock goes with the process, however it ends."""
    with ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is preparing data here. Wait for it to end.") from error
        yield


def _changed_corpus(before: dict[str, Any], now: dict[str, Any]) -> str:
    paths = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    return f"the corpus: {paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}, then and now"


def _sources(files: list[SourceFile]) -> list[SourceRecord]:
    return [
        SourceRecord(
            path=str(file.path),
            use="validation" if file.is_validation else "split",
            content=file.content,
            bytes=file.size,
            mtime_ns=file.mtime_ns,
            sha256=file.sha256,
        )
        for file in files
    ]


def _sources_json(files: list[SourceFile]) -> bytes:
    return json.dumps([record.model_dump() for record in _sources(files)]).encode()


def _known_hashes(folder: Path) -> dict[tuple[str, int, int], str]:
    """Hashes of files that a finished or interrupted preparation in this folder has made."""
    manifest = read_manifest(folder)
    if manifest is not None:
        records = manifest.sources
    else:
        try:
            stored = json.loads((folder / PARTIAL / "sources.json").read_bytes())
        except FileNotFoundError:
            return {}
        records = [SourceRecord.model_validate(record) for record in stored]
    return {(record.path, record.bytes, record.mtime_ns): record.sha256 for record in records}


def _other_files(manifest: Manifest, files: list[SourceFile]) -> list[str]:
    """How the corpus differs from the one that was prepared, by content, not by path."""
    before = [record.content for record in manifest.sources]
    now = [file.content for file in files]
    if before == now:
        return []
    if len(before) != len(now):
        return [f"the corpus: prepared from {len(before)} files, now {len(now)}"]
    changed = [str(file.path) for file, old in zip(files, before, strict=True) if file.content != old]
    return [f"the corpus: {changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''} changed since"]


def _and_others(files: list[SourceFile]) -> str:
    return f" and {len(files) - 1} more" if len(files) > 1 else ""
