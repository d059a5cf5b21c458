"""All parts of a corpus -> prepared data, byte for byte what one machine would have made of it.

    part 1, part 2, ... --units, in order--> shards, document boundaries, manifest

Copies of documents are found and left out here, across the parts, and here the unreadable rows of the whole corpus are
judged. The parts are only read, so that besides them the disk has to hold the result. Killed and run again, it goes on
after the last full shard.
"""

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hlat.config.sections import DataConfig
from hlat.data.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, content_settings, read_manifest, setting_differences
from hlat.data.prepare.corpus import Corpus, SplitPlan
from hlat.data.prepare.merge_units import UnitMerger
from hlat.data.prepare.partition import FINISHED, PartitionRecord, indexes_sha256, read_partition_record
from hlat.data.prepare.preparation import folder_lock, ignore_progress, resolve_output_folder
from hlat.data.prepare.publish import complete_staging, publish
from hlat.data.prepare.staging import StagingFolder
from hlat.data.prepare.tokenizer_and_split import ProgressCallback, make_tokenizer, refuse_empty_split
from hlat.data.prepare.work_units import read_index
from hlat.data.prepared import PreparedData, check_settings, open_prepared, token_dtype
from hlat.data.sources import SourceFile, describe_corpus_changes
from hlat.data.stores import convert_disk_errors
from hlat.runtime import DataError


@dataclass(frozen=True)
class FinishedPartition:
    """A finished part, opened."""

    folder: Path
    record: PartitionRecord

    @property
    def units(self) -> Path:
        """Where its units are."""
        return self.folder / FINISHED / "units"

    @property
    def file_range(self) -> range:
        """The files of the corpus that it was made from, by index."""
        return range(self.record.first, self.record.stop)


def merge_partition_folders(
    config: DataConfig, out_dir: str | Path, folders: Iterable[str | Path], progress: ProgressCallback | None = None
) -> PreparedData:
    """Make prepared data of all parts of a corpus; returns at once if that is done already.

    Args:
        config: the data section that the parts were prepared with.
        out_dir: the folder of the result.
        folders: the parts, in any order.
        progress: called with "merge", bytes of the corpus done, and bytes in all.

    Raises:
        DataError: parts that are missing, double, unfinished, damaged, or of another corpus or other settings, with all
            that is wrong; or the whole has more unreadable rows than data.unreadable_rows allows.
        StorageError: the disk refused.
    """
    folder, report = resolve_output_folder(out_dir), progress or ignore_progress
    settings = content_settings(config)
    parts = _opened([Path(each).expanduser() for each in folders], settings)
    files = [part.record.files[index].to_file() for part in parts for index in part.file_range]
    with convert_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=False):
            manifest = read_manifest(folder)
            if manifest is not None:
                before = [(record.path, record.content) for record in manifest.sources]
                check_settings(folder, manifest, config, describe_corpus_changes(before, files))
                return open_prepared(folder)
            staging = StagingFolder(folder)
            staging.claim(settings, files)
            if not (staging.out / MANIFEST_FILE).exists():
                _join(config, parts, files, settings, staging, report)
            publish(staging)
    return open_prepared(folder, config)


def find_partition_folders(prepared_dir: Path) -> list[Path]:
    """The folders where ``prepare_partition`` puts parts of what goes to a folder, those that are there."""
    named = f"{glob.escape(prepared_dir.name)}-part-*-of-*"
    return sorted(path for path in prepared_dir.parent.glob(named) if path.is_dir())


def _opened(folders: list[Path], settings: dict[str, object]) -> list[FinishedPartition]:
    """The parts, in their order.

    Raises:
        DataError: everything that is wrong with them.
    """
    parts: list[FinishedPartition] = []
    problems: list[str] = []
    for folder in dict.fromkeys(folders):
        try:
            parts.append(FinishedPartition(folder, read_partition_record(folder)))
        except DataError as error:
            problems.append(str(error))
    parts.sort(key=lambda part: part.record.part)
    for part in parts:
        problems += _of_part(part, parts[0], settings)
    problems += _of_numbers(parts)
    if problems or not parts:
        listed = "".join(f"\n  {problem}" for problem in problems or ["no parts were named"])
        raise DataError(f"the parts cannot be merged:{listed}")
    return parts


def _of_part(part: FinishedPartition, first: FinishedPartition, settings: dict[str, object]) -> Iterator[str]:
    """What is wrong with one part, beside the recipe's settings and another part."""
    record, beside = part.record, first.record
    for difference in setting_differences(record.settings, settings):
        yield f"{part.folder}: {difference}"
    mine, theirs = _outline(record), _outline(beside)
    if mine != theirs:
        yield f"{part.folder}: another corpus than that of {first.folder}: {_difference(mine, theirs)}"
    elif record.tails != beside.tails:
        yield f"{part.folder}: its corpus has other characters than that of {first.folder}: a file has changed"
    try:
        damaged = indexes_sha256(part.units, record.units) != record.indexes_sha256
    except OSError as error:
        yield f"{part.folder}: {error.filename}: {error.strerror}. Copy or prepare the part again"
        return
    if damaged:
        yield f"{part.folder}: its units are not those it was finished with. Copy or prepare the part again"


def _of_numbers(parts: list[FinishedPartition]) -> Iterator[str]:
    """Parts that are there twice, that are missing, or that are of another number of parts."""
    if not parts:
        return
    counts = {part.record.parts for part in parts}
    for count in sorted(counts):
        folders: dict[int, list[str]] = {number: [] for number in range(1, count + 1)}
        for part in parts:
            if part.record.parts == count:
                folders[part.record.part].append(str(part.folder))
        for number, found in folders.items():
            if len(found) > 1:
                yield f"part {number} of {count} is there {len(found)} times: {', '.join(found)}"
            if not found:
                yield f"part {number} of {count} is missing"
    if len(counts) > 1:
        listed = ", ".join(f"{part.folder} is one of {part.record.parts}" for part in parts)
        yield f"the corpus was parted in several ways: {listed}"


def _outline(record: PartitionRecord) -> list[list[str | int]]:
    """What every part knows of every file: source, column, kind and size."""
    return [file.content[:4] for file in record.files]


def _difference(mine: list[list[str | int]], theirs: list[list[str | int]]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} files, not {len(theirs)}"
    number = next(index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return f"file {number} of {len(mine)} has {mine[number][-1]} bytes, not {theirs[number][-1]}, or is of another kind"


def _join(
    config: DataConfig,
    parts: list[FinishedPartition],
    files: list[SourceFile],
    settings: dict[str, object],
    staging: StagingFolder,
    progress: ProgressCallback,
) -> None:
    """Make all of the result, in the staging folder."""
    corpus = Corpus(files, range(len(files)), config.unreadable_rows)
    tokenizer, notes = make_tokenizer(config, corpus, SplitPlan(0.0), staging.out / TOKENIZER_FOLDER, progress)
    tally, done = corpus.tally(), 0
    with UnitMerger(config, files, staging.out, token_dtype(tokenizer.vocab_size), consume=False) as merge:
        for part in parts:
            for number in range(part.record.units):
                unit = read_index(part.units, number)
                assert unit is not None, "the indexes were there when they were hashed"
                tally.add(unit.span.rows, unit.span.unreadable)
                merge.add_unit(unit, part.units)
                progress("merge", done + unit.span.position, corpus.bytes)
            done += sum(files[index].size for index in part.file_range)
        tally.finish()
        progress("merge", corpus.bytes, corpus.bytes)
        refuse_empty_split(config, corpus, merge.document_counts(), undo=", and prepare all parts again")
        complete_staging(staging, config, settings, files, tokenizer, merge, notes)
