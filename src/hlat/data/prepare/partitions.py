"""Prepare a corpus on several machines, which need no shared disk, and merge what they made.

    files, in order --by their bytes--> N ranges of complete files
    range I --work units, as for a whole corpus--> <dir>-part-I-of-N/partial/ --rename--> <dir>-part-I-of-N/part/
    partition 1, partition 2, ... --units, in order--> shards, document boundaries, manifest

A machine reads and hashes only the files of its own partition, except with data.validation.by=tail: then it counts the
characters of all files. A finished partition holds part.json, the units and the tokenizer; it takes as much disk space
as its tokens, and 40 bytes per document.

The result is byte for byte what one machine would have made. Duplicates are found and left out when partitions are
merged, and the limit on unreadable rows is checked for the whole corpus. The partitions are only read, so the disk must
hold the result in addition to them. After an interruption, a second run resumes after the last full shard.
"""

import glob
import hashlib
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hlat.config import DataConfig
from hlat.data.corpus_files import CACHE_FOLDER, describe_corpus_changes, hash_files, list_files, numbered_sources
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
    vocabulary_of_given_tokenizer,
)
from hlat.data.prepare.preparation import ignore_progress, locked_folder, resolve_output_folder, tokenize_units
from hlat.data.prepare.staging import PARTIAL, StagingFolder, UnitMerger, complete_staging, load_hashes, publish
from hlat.data.prepare.work_units import index_file, read_index
from hlat.data.prepared.consistency import content_settings, setting_differences, with_decided_tails
from hlat.data.prepared.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    SourceRecord,
    StrictRecord,
    UnknownFormatError,
    damage_of,
    read_data_manifest,
    read_record,
    write_record,
)
from hlat.data.prepared.prepared_folder import PreparedData, check_settings, open_prepared
from hlat.data.prepared.shards import token_dtype
from hlat.data.source_file import SourceFile
from hlat.data.source_listing import SourceNotFoundError, check_first_bytes
from hlat.data.stores.local_files import convert_disk_errors
from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.base import Tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import sync_to_disk
from hlat.runtime.terminal import TABLE_ROWS, listed, plural
from hlat.runtime.urls import is_url

FINISHED = "part"
_PARTITION_FILE = "part.json"
_LOG = logging.getLogger(__name__)  # a warning is a line on stderr
_WILDCARD = re.compile(r"[*?\[]")


class PartitionRecord(StrictRecord):
    """Contents of part.json, the record of a finished partition."""

    format_version: int  # version of the data format
    part: int  # number of this partition, from 1
    parts: int
    settings: dict[str, object]  # the settings that decide the content
    files: list[SourceRecord]  # all files of the corpus; those of other partitions have no sha256
    first: int  # index of the partition's first file
    stop: int  # index after the partition's last file
    # For each source, the character at which its validation tail begins; None if not split by tail.
    tails: dict[int, int] | None
    units: int
    indexes_sha256: str  # hash of all unit indexes, in order; each index holds the hashes of its token files


def partition_folder(prepared_dir: Path, part: int, parts: int) -> Path:
    """Return the folder of a partition, next to the folder of the merged data."""
    return prepared_dir.with_name(f"{prepared_dir.name}-part-{part}-of-{parts}")


def split_files(sizes: list[int], parts: int) -> list[range]:
    """Divide files into contiguous partitions of about equal bytes; return the range of file indexes of each."""
    total = max(sum(sizes), 1)
    before, counts = 0, [0] * parts
    for size in sizes:
        # A file belongs to the partition that has its middle on the line of all bytes: the same on every machine, in
        # integers.
        counts[min((2 * before + size) * parts // (2 * total), parts - 1)] += 1
        before += size
    ends = [sum(counts[: number + 1]) for number in range(parts)]
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
    """Tokenize one partition of a corpus; return at once if that is done already, even if the corpus is gone.

    The recipe must give a tokenizer. ``part`` counts from 1. ``workers`` None uses data.workers, or one process per
    core if that is None too.

    Raises:
        DataError: as ``prepare``, or the recipe gives no tokenizer.
        StorageError: a file cannot be read or written.
    """
    if config.tokenizer.path is None:
        raise DataError(
            "data.tokenizer.path: parts prepared separately need the same tokenizer. Train it first, on a machine that "
            "can read the whole corpus, with hlat data tokenizer RECIPE --to FOLDER; then set "
            "data.tokenizer.path=FOLDER on every machine."
        )
    folder, report = resolve_output_folder(out_dir), progress or ignore_progress
    settings = content_settings(config)
    key = _part_key(part, parts)
    try:
        files = list_files(config, folder)
    except SourceNotFoundError as error:
        if not (folder / FINISHED).exists():
            raise
        return _finished_without_corpus(config, folder, key | settings, error)
    file_range = split_files([file.size for file in files], parts)[part - 1]
    own = slice(file_range.start, file_range.stop)
    with convert_disk_errors(folder), locked_folder(folder, wait=(folder / FINISHED).exists()):
        done = read_partition_record(folder) if (folder / FINISHED).exists() else None
        if done is None:
            check_first_bytes(files[own], config.unreadable_rows)
        known = load_hashes(folder / (PARTIAL if done is None else FINISHED))
        files[own] = hash_files(files[own], known, partial(report, "hash"))  # hashing reads all of a file
        if done is not None:
            _refuse_other_partition(folder, done, key | with_decided_tails(settings, config, done.settings), files)
            return done
        corpus = Corpus(files, file_range, config.unreadable_rows, vocabulary_of_given_tokenizer(config))
        short = short_sources(config, corpus)
        settings |= tails_setting(short)
        staging = StagingFolder(folder, config, settings, report, workers or config.workers)
        staging.claim(files, key)
        record = _build_partition(staging, corpus, short, part, parts)
        staging.root.rename(folder / FINISHED)
        sync_to_disk(folder)
        shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
        return record


def _finished_without_corpus(
    config: DataConfig, folder: Path, key: dict[str, object], error: SourceNotFoundError
) -> PartitionRecord:
    """Return the finished partition of these settings though its corpus is gone; else raise ``error``."""
    done = read_partition_record(folder)
    paths = (source.path for source in numbered_sources(config))
    # A glob cannot be listed any more. Its fixed beginning must be that of the files: a mistyped path must not go
    # unnoticed.
    begins = (_WILDCARD.split(local_path(path))[0] for path in paths)
    places = tuple(begin if is_url(begin) else str(Path(begin)) for begin in begins)
    is_same = _part_key(done.part, done.parts) | done.settings == with_decided_tails(key, config, done.settings)
    if not is_same or not all(file.path.startswith(places) for file in done.files):
        raise error
    _LOG.warning("%s So the corpus was not compared: the finished part in %s is used without it.", error, folder)
    return done


def read_partition_record(folder: Path) -> PartitionRecord:
    """Read the record of a finished partition.

    DataError, which begins with the folder, if it is missing, damaged or of another format version.
    """
    path = folder / FINISHED / _PARTITION_FILE
    try:
        return PartitionRecord.model_validate(read_record(path))
    except UnknownFormatError as error:
        raise DataError(f"{folder}: a part of {error}") from error
    except FileNotFoundError as error:
        started = (folder / PARTIAL).exists()
        reason = (
            "the part is not finished: run its hlat data prepare --part again" if started else "no part of a corpus"
        )
        raise DataError(f"{folder}: {reason if folder.is_dir() else 'no such folder'}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {FINISHED}/{_PARTITION_FILE} is damaged: {damage_of(error)}") from error


def indexes_sha256(units: Path, count: int) -> str:
    """Hash the indexes of the first ``count`` units, in order; OSError if one is missing."""
    digest = hashlib.sha256()
    for number in range(count):
        digest.update(index_file(units, number).read_bytes())
    return digest.hexdigest()


def train_tokenizer(config: DataConfig, folder: str | Path, progress: ProgressCallback | None = None) -> Tokenizer:
    """Train the tokenizer that ``prepare`` would train, and write it to a folder, for machines that prepare partitions.

    Raises:
        DataError: the recipe gives a tokenizer, the folder exists, or the corpus cannot be used.
        StorageError: a file cannot be read or written.
    """
    target, report = resolve_output_folder(folder, "--to"), progress or ignore_progress
    if config.tokenizer.path is not None:
        raise DataError(f"data.tokenizer.path {config.tokenizer.path}: the recipe gives a tokenizer. Use that one.")
    if target.exists():
        raise DataError(f"{target}: exists already. Name a new folder, or use the tokenizer in this one.")
    work = target.with_name(f"{target.name}.work")
    with convert_disk_errors(target, "--to"):
        work.mkdir(parents=True, exist_ok=True)
        files = list_files(config, work)
        check_first_bytes(files, config.unreadable_rows)
        corpus = Corpus(files, range(len(files)), config.unreadable_rows)
        plan = plan_split(config, corpus, short_sources(config, corpus), report)
        tokenizer, _ = make_tokenizer(config, corpus, plan, target, report)
        sync_to_disk(target.parent)
        shutil.rmtree(work, ignore_errors=True)
    return tokenizer


def _part_key(part: int, parts: int) -> dict[str, object]:
    return {"--part": f"{part}/{parts}"}


def _refuse_other_partition(
    folder: Path, done: PartitionRecord, key: dict[str, object], files: list[SourceFile]
) -> None:
    """Raise DataError if a finished partition is of other settings or other files."""
    before = [(record.path, record.content) for record in done.files]
    found = setting_differences(_part_key(done.part, done.parts) | done.settings, key)
    if found := found + describe_corpus_changes(before, files):
        reasons = "".join(f"\n  {reason}" for reason in found)
        raise DataError(
            f"{folder}: holds a part prepared with other settings or files:{reasons}\nUse another folder, or delete "
            "this one to prepare again, or restore those settings and files."
        )


def _build_partition(
    staging: StagingFolder, corpus: Corpus, short: SourceTails, part: int, parts: int
) -> PartitionRecord:
    """Tokenize all units of a partition, and write its record, in the staging folder."""
    plan = plan_split(staging.config, corpus, short, staging.report)
    tokenizer, _ = make_tokenizer(staging.config, corpus, plan, staging.out / TOKENIZER_FOLDER, staging.report)
    units = position = 0  # from the first on without a gap, and the bytes of the partition that they cover

    def count_finished() -> int:
        nonlocal units, position
        while (unit := read_index(staging.units, units)) is not None:
            units, position = units + 1, unit.span.position
        return position

    tokenize_units(staging, corpus, plan, token_dtype(tokenizer.vocab_size), count_finished)
    record = PartitionRecord(
        format_version=FORMAT_VERSION,
        part=part,
        parts=parts,
        settings=staging.settings,
        files=[SourceRecord.from_file(file) for file in corpus.files],
        first=corpus.file_range.start,
        stop=corpus.file_range.stop,
        tails=plan.tails or None,
        units=units,
        indexes_sha256=indexes_sha256(staging.units, units),
    )
    # last: the record names every unit, so all of them exist
    write_record(staging.root / _PARTITION_FILE, record)
    for written in (staging.out, staging.units, staging.root):
        sync_to_disk(written)
    return record


@dataclass(frozen=True)
class FinishedPartition:
    """A finished partition: its folder and its record."""

    folder: Path
    record: PartitionRecord

    @property
    def units(self) -> Path:
        return self.folder / FINISHED / "units"

    @property
    def file_range(self) -> range:
        return range(self.record.first, self.record.stop)


def merge_partition_folders(
    config: DataConfig, out_dir: str | Path, folders: Iterable[str | Path], progress: ProgressCallback | None = None
) -> PreparedData:
    """Make prepared data from all partitions of a corpus; return at once if that is done already.

    The folders come in any order. ``progress`` gets "merge", the bytes of the corpus done, and the bytes in total.

    Raises:
        DataError: lists all problems: partitions missing, given twice, unfinished, damaged, or of another corpus or
            other settings; or too many unreadable rows in the whole corpus.
        StorageError: a file cannot be read or written.
    """
    folder, report = resolve_output_folder(out_dir), progress or ignore_progress
    partitions = _load_partitions(config, [Path(local_path(path)) for path in folders])
    # One of the settings that the partitions share, or they would have been refused.
    settings = with_decided_tails(content_settings(config), config, partitions[0].record.settings)
    files = [partition.record.files[index].to_file() for partition in partitions for index in partition.file_range]
    with locked_folder(folder, wait=False):
        manifest = read_data_manifest(folder)
        if manifest is not None:
            check_settings(folder, manifest, config, files)
            return open_prepared(folder)
        staging = StagingFolder(folder, config, settings, report)
        staging.claim(files)
        if not (staging.out / MANIFEST_FILE).exists():
            _merge_partitions(staging, partitions, files)
        publish(staging)
    return open_prepared(folder, config)


def find_partition_folders(prepared_dir: Path) -> list[Path]:
    """Return the existing partition folders next to a folder of merged data, as ``prepare_partition`` names them."""
    pattern = f"{glob.escape(prepared_dir.name)}-part-*-of-*"
    return sorted(path for path in prepared_dir.parent.glob(pattern) if path.is_dir())


def _load_partitions(config: DataConfig, folders: list[Path]) -> list[FinishedPartition]:
    """Read and check the partitions; return them in order. DataError lists all their problems."""
    partitions: list[FinishedPartition] = []
    problems: list[str] = []
    for folder in dict.fromkeys(folders):
        try:
            partitions.append(FinishedPartition(folder, read_partition_record(folder)))
        except DataError as error:
            problems.append(str(error))
    partitions.sort(key=lambda partition: partition.record.part)
    before = partitions[0].record.settings if partitions else {}
    settings = with_decided_tails(content_settings(config), config, before)
    for partition in partitions:
        problems += _partition_problems(partition, partitions[0], settings)
    problems += _numbering_problems(partitions)
    if problems or not partitions:
        none = (
            "no parts were named, and none are beside the folder of the data; hlat data prepare --part I/N makes them"
        )
        shown = listed(problems or [none], TABLE_ROWS, "\n  ")
        raise DataError(f"the parts cannot be merged:\n  {shown}")
    return partitions


def _partition_problems(
    partition: FinishedPartition, first: FinishedPartition, settings: dict[str, object]
) -> Iterator[str]:
    """Yield how a partition differs from the recipe's settings and from the first partition."""
    record, reference = partition.record, first.record
    for difference in setting_differences(record.settings, settings):
        yield f"{partition.folder}: {difference}"
    outline, expected = _file_outline(record), _file_outline(reference)
    if outline != expected:
        difference = _outline_difference(outline, expected)
        yield f"{partition.folder}: its corpus differs from that of {first.folder}: {difference}"
    elif record.tails != reference.tails:
        yield f"{partition.folder}: its corpus has other characters than that of {first.folder}: a file has changed"
    try:
        damaged = indexes_sha256(partition.units, record.units) != record.indexes_sha256
    except OSError as error:
        yield f"{partition.folder}: {error.filename}: {error.strerror}. Copy or prepare the part again"
        return
    if damaged:
        yield f"{partition.folder}: its units have changed since it was finished. Copy or prepare the part again"


def _numbering_problems(partitions: list[FinishedPartition]) -> Iterator[str]:
    """Yield each partition that is missing or given twice, and partitions of different divisions."""
    if not partitions:
        return
    counts = {partition.record.parts for partition in partitions}
    for count in sorted(counts):
        folders: dict[int, list[str]] = {number: [] for number in range(1, count + 1)}
        for partition in partitions:
            if partition.record.parts == count:
                folders[partition.record.part].append(str(partition.folder))
        for number, same in folders.items():
            if len(same) > 1:
                yield f"part {number} of {count} was given {len(same)} times: {listed(same)}"
            if not same:
                yield f"part {number} of {count} is missing"
    if len(counts) > 1:
        found = listed(f"{partition.folder} is one of {partition.record.parts}" for partition in partitions)
        yield f"the parts are of different divisions of the corpus: {found}"


def _file_outline(record: PartitionRecord) -> list[list[str | int]]:
    """Return source, column, type and size of every file of the corpus; every partition knows these."""
    return [file.content[:4] for file in record.files]


def _outline_difference(outline: list[list[str | int]], expected: list[list[str | int]]) -> str:
    if len(outline) != len(expected):
        return f"{plural(len(outline), 'file')}, not {len(expected)}"
    number = next(index for index, pair in enumerate(zip(outline, expected, strict=True)) if pair[0] != pair[1])
    size, expected_size = outline[number][-1], expected[number][-1]
    return f"file {number} of {len(outline)} has {size} bytes, not {expected_size}, or is of another type"


def _merge_partitions(staging: StagingFolder, partitions: list[FinishedPartition], files: list[SourceFile]) -> None:
    """Merge the units of all partitions and write the complete result into the staging folder."""
    config, progress = staging.config, staging.report
    corpus = Corpus(files, range(len(files)), config.unreadable_rows)
    tokenizer, notes = make_tokenizer(config, corpus, SplitPlan(0.0), staging.out / TOKENIZER_FOLDER, progress)
    bad_rows, done = corpus.new_bad_row_counter(), 0
    # The partitions are only read: a merge that fails can be done again.
    with UnitMerger(config, files, staging.out, token_dtype(tokenizer.vocab_size), consume=False) as merger:
        for partition in partitions:
            for number in range(partition.record.units):
                unit = read_index(partition.units, number)
                assert unit is not None, "all indexes existed when they were hashed"
                bad_rows.add(unit.span.rows, unit.span.unreadable)
                merger.add_unit(unit, partition.units)
                progress("merge", done + unit.span.position, corpus.bytes)
            done += sum(files[index].size for index in partition.file_range)
        bad_rows.finish()
        progress("merge", corpus.bytes, corpus.bytes)
        refuse_empty_split(config, corpus, merger.document_counts(), undo=", and prepare all parts again")
        complete_staging(staging, files, tokenizer, merger, notes)
