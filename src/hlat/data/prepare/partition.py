"""A part of a corpus, prepared by one of several machines, which need not see one another.

    files --by their bytes, in order--> N stretches of whole files
    stretch I --units, as of a whole corpus--> <dir>-part-I-of-N/partial/ --rename--> <dir>-part-I-of-N/part/
    all parts --hlat.data.prepare.merge_partitions--> prepared data

A machine reads and hashes the files of its own part only, except where validation takes the tails of sources: then it
counts the characters of all. The finished part holds part.json, the units and the tokenizer: as much disk as the
tokens of the part, and 40 bytes a document.
"""

import hashlib
import shutil
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from hlat.config.sections import DataConfig
from hlat.data.manifest import (
    FORMAT_VERSION,
    TOKENIZER_FOLDER,
    SourceRecord,
    StrictRecord,
    UnknownFormatError,
    content_settings,
    load_hashes,
    read_record,
    setting_differences,
    validation_summary,
    write_record,
)
from hlat.data.prepare.corpus import Corpus
from hlat.data.prepare.preparation import folder_lock, ignore_progress, resolve_output_folder, tokenize_units
from hlat.data.prepare.staging import PARTIAL, StagingFolder
from hlat.data.prepare.tokenizer_and_split import (
    ProgressCallback,
    make_tokenizer,
    plan_split,
    vocabulary_of_given_tokenizer,
)
from hlat.data.prepare.work_units import index_file, read_index
from hlat.data.prepared import token_dtype
from hlat.data.sources import CACHE_FOLDER, SourceFile, describe_corpus_changes, hash_files, list_files
from hlat.data.stores import convert_disk_errors, sync_folder
from hlat.data.tokenizers import Tokenizer
from hlat.runtime import DataError

FINISHED = "part"
_RECORD = "part.json"


class PartitionRecord(StrictRecord):
    """What a finished part is.

    Attributes:
        format_version: of the data.
        part, parts: it is the ``part``-th of so many, from 1.
        settings: those that decide the content.
        files: all files of the corpus; those that are not the part's have no sha256.
        first, stop: the files of the part, by index: first <= index < stop.
        tails: for each source, the character at which its validation tail begins; None if not split by tail.
        units: how many there are.
        indexes_sha256: of their indexes, in order; these have the hashes of their tokens.
    """

    format_version: int
    part: int
    parts: int
    settings: dict[str, object]
    files: list[SourceRecord]
    first: int
    stop: int
    tails: dict[int, int] | None
    units: int
    indexes_sha256: str


def partition_folder(prepared_dir: Path, part: int, parts: int) -> Path:
    """Where a part goes: beside the folder of the whole."""
    return prepared_dir.with_name(f"{prepared_dir.name}-part-{part}-of-{parts}")


def split_files(sizes: list[int], parts: int) -> list[range]:
    """The files of each part, by index: a file belongs to the part in whose N-th of all bytes its middle lies."""
    total = max(sum(sizes), 1)
    before, counts = 0, [0] * parts
    for size in sizes:
        counts[min((2 * before + size) * parts // (2 * total), parts - 1)] += 1
        before += size
    ends = [sum(counts[: part + 1]) for part in range(parts)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def prepare_partition(
    config: DataConfig,
    out_dir: str | Path,
    part: int,
    parts: int,
    *,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> PartitionRecord:
    """Tokenize the ``part``-th of so many parts of a corpus; returns at once if that is done already.

    Args:
        config: the data section; the tokenizer has to be given.
        out_dir: the folder of the part.
        part: which one, from 1.
        parts: how many there are.
        workers: processes that tokenize; None for data.workers, and for that one per core.
        progress: see Progress.

    Raises:
        DataError: as ``prepare``, or no tokenizer is given.
        StorageError: the disk refused.
    """
    if config.tokenizer.path is None:
        raise DataError(
            "data.tokenizer.path: parts that are prepared apart need one tokenizer. Train it first, on a machine that "
            "sees the whole corpus, with hlat data tokenizer RECIPE --to FOLDER; then give data.tokenizer.path=FOLDER "
            "on every machine."
        )
    folder, report = resolve_output_folder(out_dir), progress or ignore_progress
    files, settings = list_files(config, folder), content_settings(config)
    file_range = split_files([file.size for file in files], parts)[part - 1]
    with convert_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=(folder / FINISHED).exists()):
            done = read_partition_record(folder) if (folder / FINISHED).exists() else None
            known = load_hashes(folder / (PARTIAL if done is None else FINISHED))
            files[file_range.start : file_range.stop] = hash_files(
                files[file_range.start : file_range.stop], known, partial(report, "hash")
            )
            key = _staging_key(settings, part, parts)
            if done is not None:
                _refuse_other_partition(folder, done, key, files)
                return done
            staging = StagingFolder(folder)
            staging.claim(key, files)
            corpus = Corpus(files, file_range, config.unreadable_rows, vocabulary_of_given_tokenizer(config))
            record = _build(config, corpus, settings, (part, parts), staging, workers or config.workers, report)
            staging.root.rename(folder / FINISHED)
            sync_folder(folder)
            shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
            return record


def read_partition_record(folder: Path) -> PartitionRecord:
    """The record of the finished part in a folder.

    Raises:
        DataError: there is none, or it is damaged or of another format; the message begins with the folder.
    """
    path = folder / FINISHED / _RECORD
    try:
        return PartitionRecord.model_validate(read_record(path))
    except UnknownFormatError as error:
        raise DataError(f"{folder}: a part of {error}") from error
    except FileNotFoundError as error:
        begun = (folder / PARTIAL).exists()
        what = "the part is not finished: run its hlat data prepare --part again" if begun else "no part of a corpus"
        raise DataError(f"{folder}: {what if folder.is_dir() else 'no such folder'}") from error
    except (OSError, ValueError) as error:
        what = validation_summary(error) if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{folder}: {FINISHED}/{_RECORD} is damaged: {what}") from error


def indexes_sha256(units: Path, count: int) -> str:
    """The hash of the indexes of units, in order.

    Raises:
        OSError: one is missing, or cannot be read.
    """
    digest = hashlib.sha256()
    for number in range(count):
        digest.update(index_file(units, number).read_bytes())
    return digest.hexdigest()


def train_tokenizer(config: DataConfig, folder: str | Path, progress: ProgressCallback | None = None) -> Tokenizer:
    """The tokenizer that ``prepare`` would train, written to a folder, for machines that prepare parts.

    Raises:
        DataError: a tokenizer is given, the folder exists, or the corpus cannot be used.
        StorageError: the disk refused.
    """
    to, report = resolve_output_folder(folder, "--to"), progress or ignore_progress
    if config.tokenizer.path is not None:
        raise DataError(f"data.tokenizer.path {config.tokenizer.path}: the recipe gives a tokenizer; use that.")
    if to.exists():
        raise DataError(f"{to}: exists already. Name a folder that does not, or use the tokenizer in it.")
    work = to.with_name(f"{to.name}.work")
    with convert_disk_errors(to, "--to"):
        work.mkdir(parents=True, exist_ok=True)
        (work / "characters.json").unlink(missing_ok=True)  # of a run that was killed, and perhaps of another corpus
        files = list_files(config, work)
        corpus = Corpus(files, range(len(files)), config.unreadable_rows)
        plan = plan_split(config, corpus, work / "characters.json", report)
        tokenizer, _ = make_tokenizer(config, corpus, plan, to, report)
        sync_folder(to.parent)
        shutil.rmtree(work, ignore_errors=True)
    return tokenizer


def _staging_key(settings: dict[str, object], part: int, parts: int) -> dict[str, object]:
    return {"--part": f"{part}/{parts}", **settings}


def _refuse_other_partition(
    folder: Path, done: PartitionRecord, key: dict[str, object], files: list[SourceFile]
) -> None:
    before = [(record.path, record.content) for record in done.files]
    found = setting_differences(_staging_key(done.settings, done.part, done.parts), key) + describe_corpus_changes(
        before, files
    )
    if found:
        listed = "".join(f"\n  {reason}" for reason in found)
        raise DataError(
            f"{folder}: holds a part that was prepared otherwise:{listed}\nGive another folder, or delete this one to "
            "prepare anew, or go back to what it was prepared with."
        )


def _build(
    config: DataConfig,
    corpus: Corpus,
    settings: dict[str, object],
    numbers: tuple[int, int],
    staging: StagingFolder,
    workers: int | None,
    progress: ProgressCallback,
) -> PartitionRecord:
    """Make all units of a part, and its record, in the staging folder."""
    plan = plan_split(config, corpus, staging.characters, progress)
    tokenizer, _ = make_tokenizer(config, corpus, plan, staging.out / TOKENIZER_FOLDER, progress)
    counted = _FinishedUnits(staging.units)
    tokenize_units(corpus, plan, staging, token_dtype(tokenizer.vocab_size), workers, progress, counted.look)
    record = PartitionRecord(
        format_version=FORMAT_VERSION,
        part=numbers[0],
        parts=numbers[1],
        settings=settings,
        files=[SourceRecord.from_file(file) for file in corpus.files],
        first=corpus.file_range.start,
        stop=corpus.file_range.stop,
        tails=plan.tails,
        units=counted.units,
        indexes_sha256=indexes_sha256(staging.units, counted.units),
    )
    write_record(staging.root / _RECORD, record)
    for written in (staging.out, staging.units, staging.root):
        sync_folder(written)
    return record


class _FinishedUnits:
    """How many units are finished, from the first on without a gap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.units = self._position = 0

    def look(self) -> int:
        """Look on; returns the bytes of the part that they have come to."""
        while (unit := read_index(self._folder, self.units)) is not None:
            self.units += 1
            self._position = unit.span.position
        return self._position
