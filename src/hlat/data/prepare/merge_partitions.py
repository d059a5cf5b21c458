"""Merge all partitions of a corpus into prepared data, byte for byte what one machine would have made.

    partition 1, partition 2, ... --units, in order--> shards, document boundaries, manifest

Duplicates are found and left out here, across partitions, and the limit on unreadable rows is checked for the whole
corpus. The partitions are only read, so the disk must hold the result in addition to them. After an interruption, a
second run resumes after the last full shard.
"""

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hlat.config import DataConfig
from hlat.data.manifest.manifest import MANIFEST_FILE, TOKENIZER_FOLDER
from hlat.data.manifest.manifest_file import read_data_manifest
from hlat.data.manifest.settings import content_settings, setting_differences
from hlat.data.prepare.corpus import Corpus, SplitPlan
from hlat.data.prepare.merge_units import UnitMerger
from hlat.data.prepare.partition import FINISHED, PartitionRecord, indexes_sha256, read_partition_record
from hlat.data.prepare.preparation import folder_lock, ignore_progress, resolve_output_folder
from hlat.data.prepare.publish import complete_staging, publish
from hlat.data.prepare.staging import StagingFolder
from hlat.data.prepare.tokenizer_and_split import ProgressCallback, make_tokenizer, refuse_empty_split
from hlat.data.prepare.work_units import read_index
from hlat.data.prepared.prepared_folder import PreparedData, check_settings, open_prepared
from hlat.data.prepared.shards import token_dtype
from hlat.data.sources.file_list import describe_corpus_changes
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores.atomic_files import convert_disk_errors
from hlat.data.stores.remote import local_path
from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import plural


@dataclass(frozen=True)
class FinishedPartition:
    """A finished partition: its folder and its record."""

    folder: Path
    record: PartitionRecord

    @property
    def units(self) -> Path:
        """Folder of its units."""
        return self.folder / FINISHED / "units"

    @property
    def file_range(self) -> range:
        """Indexes of the corpus files that it was made from."""
        return range(self.record.first, self.record.stop)


def merge_partition_folders(
    config: DataConfig, out_dir: str | Path, folders: Iterable[str | Path], progress: ProgressCallback | None = None
) -> PreparedData:
    """Make prepared data from all partitions of a corpus; return at once if that is done already.

    Args:
        config: the data section that the partitions were prepared with.
        out_dir: the output folder.
        folders: the folders of the partitions, in any order.
        progress: called with "merge", the bytes of the corpus done, and the bytes in total.

    Raises:
        DataError: partitions are missing, given twice, unfinished, damaged, or of another corpus or other settings (the
            message lists all problems); or the whole corpus has more unreadable rows than data.unreadable_rows allows.
        StorageError: a file cannot be read or written.
    """
    folder, report = resolve_output_folder(out_dir), progress or ignore_progress
    settings = content_settings(config)
    partitions = _load_partitions([Path(local_path(path)) for path in folders], settings)
    files = [partition.record.files[index].to_file() for partition in partitions for index in partition.file_range]
    with convert_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=False):
            manifest = read_data_manifest(folder)
            if manifest is not None:
                before = [(record.path, record.content) for record in manifest.sources]
                check_settings(folder, manifest, config, describe_corpus_changes(before, files))
                return open_prepared(folder)
            staging = StagingFolder(folder)
            staging.claim(settings, files)
            if not (staging.out / MANIFEST_FILE).exists():
                _merge(config, partitions, files, settings, staging, report)
            publish(staging)
    return open_prepared(folder, config)


def find_partition_folders(prepared_dir: Path) -> list[Path]:
    """Return the existing partition folders next to a folder of merged data, as ``prepare_partition`` names them."""
    pattern = f"{glob.escape(prepared_dir.name)}-part-*-of-*"
    return sorted(path for path in prepared_dir.parent.glob(pattern) if path.is_dir())


def _load_partitions(folders: list[Path], settings: dict[str, object]) -> list[FinishedPartition]:
    """Read the partitions' records and check them; return the partitions in their order.

    Raises:
        DataError: lists every problem of every partition.
    """
    partitions: list[FinishedPartition] = []
    problems: list[str] = []
    for folder in dict.fromkeys(folders):
        try:
            partitions.append(FinishedPartition(folder, read_partition_record(folder)))
        except DataError as error:
            problems.append(str(error))
    partitions.sort(key=lambda partition: partition.record.part)
    for partition in partitions:
        problems += _partition_problems(partition, partitions[0], settings)
    problems += _numbering_problems(partitions)
    if problems or not partitions:
        none = (
            "no parts were named, and none are beside the folder of the data; hlat data prepare --part I/N makes them"
        )
        listed = "".join(f"\n  {problem}" for problem in problems or [none])
        raise DataError(f"the parts cannot be merged:{listed}")
    return partitions


def _partition_problems(
    partition: FinishedPartition, first: FinishedPartition, settings: dict[str, object]
) -> Iterator[str]:
    """Yield the problems of one partition, compared with the recipe's settings and with the first partition."""
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
    """Yield a problem for each partition that is missing or given twice, and if the numbers of partitions differ."""
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
                yield f"part {number} of {count} was given {len(same)} times: {', '.join(same)}"
            if not same:
                yield f"part {number} of {count} is missing"
    if len(counts) > 1:
        listed = ", ".join(f"{partition.folder} is one of {partition.record.parts}" for partition in partitions)
        yield f"the parts are of different divisions of the corpus: {listed}"


def _file_outline(record: PartitionRecord) -> list[list[str | int]]:
    """Return source, column, type and size of every file of the corpus; every partition knows these."""
    return [file.content[:4] for file in record.files]


def _outline_difference(outline: list[list[str | int]], expected: list[list[str | int]]) -> str:
    if len(outline) != len(expected):
        return f"{plural(len(outline), 'file')}, not {len(expected)}"
    number = next(index for index, pair in enumerate(zip(outline, expected, strict=True)) if pair[0] != pair[1])
    size, expected_size = outline[number][-1], expected[number][-1]
    return f"file {number} of {len(outline)} has {size} bytes, not {expected_size}, or is of another type"


def _merge(
    config: DataConfig,
    partitions: list[FinishedPartition],
    files: list[SourceFile],
    settings: dict[str, object],
    staging: StagingFolder,
    progress: ProgressCallback,
) -> None:
    """Merge the units of all partitions and write the complete result into the staging folder."""
    corpus = Corpus(files, range(len(files)), config.unreadable_rows)
    tokenizer, notes = make_tokenizer(config, corpus, SplitPlan(0.0), staging.out / TOKENIZER_FOLDER, progress)
    bad_rows, done = corpus.new_bad_row_counter(), 0
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
        complete_staging(staging, config, settings, files, tokenizer, merger, notes)
