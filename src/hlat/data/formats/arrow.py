"""Arrow files and streams: rows from any row on, ranges of rows; and folders of streams that ``datasets`` wrote.

    .arrow, .feather, .ipc --record batches--> rows --> documents
                           --record batches, divided--> ranges of rows
    folder/state.json --> data-00000-of-00002.arrow, data-00001-of-00002.arrow, in order

A stream has no list of its batches, so it is one range. In a folder that Hugging Face's ``Dataset.save_to_disk`` wrote
the batches of streams are counted.

A ``DatasetDict`` is a folder of such folders, one per split, with dataset_dict.json. The format is that of
``datasets/arrow_dataset.py`` (``save_to_disk`` and ``load_from_disk``) in https://github.com/huggingface/datasets.
Whatever makes the rows of a dataset others than those of its files is refused: a mapping of indices, and a transform.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyarrow import ipc

from hlat.data.formats.base import WHOLE_FILE, FileFormat, FileRange, group_ranges
from hlat.data.formats.rows import TEXT_COLUMN, ColumnKind, InputFile, Row
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import recognize
from hlat.runtime.terminal import escape_name, listed, plural

_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")  # length of the footer, and the magic word again
_BLOCK = struct.Struct("<qi4xq")  # offset, length of its metadata, length of its body
_BATCHES = 4 + 2 * 3  # place of the field in the table of fields
_PADDING = 256  # more than an end marker and what aligns it, less than any file
_CONTINUES = b"\xff\xff\xff\xff"  # first bytes of each message of a stream, since Arrow 0.15


class ArrowFormat(FileFormat):
    """Arrow files and streams, with a column of any kind."""

    kind = "arrow"
    endings: ClassVar[tuple[str, ...]] = (".arrow", ".arrows", ".feather", ".ipc")

    def __init__(self, column: ColumnKind = TEXT_COLUMN) -> None:
        self.column: ColumnKind = column

    def is_own_content(self, head: bytes) -> bool:
        # A stream of before 2019 begins with a length of a few kilobytes, which has zero bytes.
        return head.startswith((_MAGIC, _CONTINUES)) or (b"\0" in head[:4] and super().is_own_content(head))

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        size = file.path.stat().st_size
        with pa.memory_map(str(file.path)) as source:
            if source.read(len(_MAGIC)) == _MAGIC:
                reader = ipc.open_file(source)
                _check_not_joined(source, file.path)
                batches: Iterator[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                source.seek(0)
                reader = ipc.open_stream(source)
                batches = stream_batches(reader, source, file.path)
            self.column.check(file, reader.schema)
            columns = (batch.column(reader.schema.get_field_index(file.column)) for batch in batches)
            yield from self.column.rows(columns, file, 0, start, lambda _: min(source.tell(), size))

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        rows = self._batch_rows(file.path)
        if rows is None:
            yield WHOLE_FILE
            return
        # A batch has no recorded size here: bytes are shared out by rows.
        total = file.path.stat().st_size
        yield from group_ranges(((count, total * count // max(sum(rows), 1)) for count in rows), size)

    def _batch_rows(self, path: Path) -> list[int] | None:
        """Return the rows of each record batch; None for a stream, which has no list of them."""
        with pa.memory_map(str(path)) as source:
            if source.read(len(_MAGIC)) != _MAGIC:
                return None
            reader = ipc.open_file(source)
            return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]


def stream_batches(reader: Any, source: Any, path: Path) -> Iterator[Any]:
    """Yield the record batches; DataError without an end marker, or with bytes after it."""
    read = source.tell()
    # A stream that was cut between two batches looks complete but for its end marker.
    for batch in reader:
        read = source.tell()
        yield batch
    if source.tell() == read:  # the end marker would have been read
        raise DataError(
            f"{path}: the arrow stream has no end marker: it was cut off between two batches, or its writer was not "
            "closed. Fetch or write the file again."
        )
    if rest := source.size() - source.tell():
        raise DataError(
            f"{path}: {rest:,} bytes follow the end of the arrow stream: several streams that were joined, "
            "which are not read as one, or an incomplete copy. Make each stream a file of its own, or fetch it again."
        )


def _check_not_joined(source: Any, path: Path) -> None:
    """Raise DataError if the record batches that the footer lists do not end where it begins."""
    # Of files that were joined only the last footer is read, at the places of the first file: half of the rows.
    tail = source.size() - _TAIL.size
    source.seek(tail)
    begin = tail - _TAIL.unpack(source.read(_TAIL.size))[0]
    source.seek(begin)
    footer = source.read(tail - begin)
    table = struct.unpack_from("<I", footer)[0]  # Footer of File.fbs: its field 3 is the vector of record batches
    fields = table - struct.unpack_from("<i", footer, table)[0]
    is_there = struct.unpack_from("<H", footer, fields)[0] > _BATCHES
    field = table + (is_there and struct.unpack_from("<H", footer, fields + _BATCHES)[0])
    vector = field + struct.unpack_from("<I", footer, field)[0] if field > table else 0
    count = struct.unpack_from("<I", footer, vector)[0] if vector else 0
    blocks = [_BLOCK.unpack_from(footer, vector + 4 + number * _BLOCK.size) for number in range(count)]
    source.seek(0)
    if begin - max(map(sum, blocks), default=begin) > _PADDING or (not blocks and _MAGIC * 2 in source.read(begin)):
        raise DataError(f"{path}: several arrow files that were joined. Make each a file of its own.")


_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_SHARDS, _SHARD = "data-*-of-*.arrow", re.compile(r"data-\d+-of-(\d+)\.arrow")
# Errors that damaged JSON of any shape may cause.
_UNKNOWN = (DataError, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError)
_SAVE_AGAIN = "Save the dataset again with save_to_disk."


class HuggingFaceFormat(ArrowFormat):
    """Datasets that ``save_to_disk`` wrote, with a column of text or of token ids."""

    kind = "hf-dataset"
    endings = ()

    def _batch_rows(self, path: Path) -> list[int] | None:
        rows = super()._batch_rows(path)
        if rows is not None:
            return rows
        # A stream is walked through; as it is mapped, only the headers of its batches are read.
        with pa.memory_map(str(path)) as source:
            return [batch.num_rows for batch in stream_batches(ipc.open_stream(source), source, path)]

    def doubt(self, paths: Sequence[Path]) -> str:
        folder = paths[0].parent
        try:
            # The file dataset_info.json keeps the number of rows from before a filter, so fewer rows are only a doubt.
            splits = json.loads((folder / _INFO).read_bytes())["splits"]
            split = json.loads((folder / _STATE).read_bytes()).get("_split")
            said = (splits[split] if split in splits else next(iter(splits.values())))["num_examples"]
            found = sum(sum(self._batch_rows(path) or ()) for path in paths)
        except _UNKNOWN:
            return ""  # reading the dataset reports what is wrong with it
        if not isinstance(said, int) or found >= said:
            return ""
        return f"{folder}: {found:,} rows, and {_INFO} says {said:,}; fewer are right after a filter or a selection."

    def folder_files(self, names: Sequence[str], read: Callable[[str], bytes]) -> list[str] | None:
        if _DICT in names:
            return _split_files(names, read)
        if _STATE in names and (_INFO in names or any(fnmatch(name, _SHARDS) for name in names)):
            return _dataset_files("", names, read)
        # Datasets in folders below would otherwise be read as loose arrow files, whatever their state.json says.
        inner = [name.removesuffix(f"/{_STATE}") for name in names if name.endswith(f"/{_STATE}")]
        inner = [folder for folder in inner if f"{folder}/{_INFO}" in names]
        if inner:
            raise DataError(
                f"holds datasets of save_to_disk in its folders {_list(inner)}. Make each an entry of data.sources."
            )
        return None


def _split_files(names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the files of a DatasetDict, which must have a single split."""
    splits = _json(_DICT, read).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise DataError(f"{_DICT} does not list the splits. {_SAVE_AGAIN}")
    if len(splits) > 1:
        raise DataError(
            f"a DatasetDict with the splits {_list(splits)}. Name the folder of one as the corpus, for example "
            f"its folder {escape_name(splits[0])}, and that of another as data.validation.path."
        )
    return _dataset_files(f"{splits[0]}/", names, read)


def _dataset_files(folder: str, names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the data files of the dataset in ``folder`` ("" or "name/"); DataError if it is incomplete."""
    for file in (_STATE, _INFO):
        if folder + file not in names:
            raise DataError(f"{folder}{file} is missing: the dataset was not saved completely. {_SAVE_AGAIN}")
    state = _json(folder + _STATE, read)
    _refuse_views(folder + _STATE, state)
    files = [folder + entry for entry in _entries(folder, state, names)]
    if len(set(files)) < len(files):
        raise DataError(f"{folder}{_STATE} lists a data file twice. {_SAVE_AGAIN}")
    for file in files:  # their names may speak of more files than are listed
        if (shard := _SHARD.fullmatch(file.removeprefix(folder))) and int(shard[1]) != len(files):
            raise DataError(
                f"{folder}{_STATE} lists {plural(len(files), 'data file')}, but {file} is one of {int(shard[1])}. "
                f"Copy the folder again. {_SAVE_AGAIN}"
            )
    return files


def _refuse_views(path: str, state: dict[str, Any]) -> None:
    """Raise DataError if the rows of a dataset are not those of its files, one after the other."""
    for key, value in state.items():
        if key.startswith("_indices") and value:
            raise DataError(
                f"{path} has a mapping of indices ({escape_name(key)}), which selects and orders the rows. Save the "
                "dataset again after dataset.flatten_indices()."
            )
    # A transform is stored as a format, or, by old versions of datasets, in the history of the table.
    options, history = state.get("_format_kwargs"), state.get("_inplace_history")
    steps = history if isinstance(history, list) else []
    past = any(isinstance(step, dict) and step.get("transforms") for step in steps)
    if state.get("_format_type") == "custom" or (isinstance(options, dict) and "transform" in options) or past:
        raise DataError(f"{path} has a transform, which hlat does not run. Apply it with dataset.map, and save again.")


def _entries(folder: str, state: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the names of the data files, which must be next to state.json; each entry has a name and nothing else."""
    path, entries = folder + _STATE, state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path} lists no data files. {_SAVE_AGAIN}")
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() != {"filename"} or not isinstance(entry["filename"], str):
            raise DataError(
                f"{path} describes a data file with more or less than its name: {str(entry)[:80]!a}. {_SAVE_AGAIN}"
            )
        # A path out of the folder must never be opened.
        if "/" in entry["filename"] or folder + entry["filename"] not in names:
            raise DataError(
                f"{path} names the data file {escape_name(entry['filename'][:200])}, which is not next to it. "
                f"Copy the folder again. {_SAVE_AGAIN}"
            )
        yield entry["filename"]


def _json(path: str, read: Callable[[str], bytes]) -> dict[str, Any]:
    content = read(path)
    if found := recognize(content):
        raise DataError(f"{path} is {found.what}. {found.remedy}")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {str(error)[:200]}. {_SAVE_AGAIN}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object. {_SAVE_AGAIN}")
    return value


def _list(names: list[str]) -> str:
    return listed(map(escape_name, names), 10)
