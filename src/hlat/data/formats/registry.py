"""The file formats that hlat reads. This is the only place that lists them.

    name of a file or names in a folder, kind of column --> format

To add one, write a class in a file of this folder and add it here. A new kind of column
(``hlat.data.formats.rows``) is read by the formats of columns without a change.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from hlat.config import own_parts
from hlat.data.formats.arrow import ArrowFormat, HuggingFaceFormat
from hlat.data.formats.base import FileFormat
from hlat.data.formats.csv_table import CsvFormat, TsvFormat
from hlat.data.formats.megatron import MegatronFormat
from hlat.data.formats.parquet import ParquetFormat
from hlat.data.formats.rows import COLUMN_KINDS, TEXT_COLUMN, ColumnKind
from hlat.data.formats.streams import COMPRESSED_ENDINGS
from hlat.data.formats.text import JsonLinesFormat, TextFormat
from hlat.runtime.errors import DataError

DEFAULT = TextFormat()  # the format of files with an ending that is not known
# Formats that exist once per kind of column.
_OF_COLUMNS: tuple[Callable[[ColumnKind], FileFormat], ...] = (
    ParquetFormat,
    ArrowFormat,
    HuggingFaceFormat,
    JsonLinesFormat,
)
# All formats.
FORMATS: tuple[FileFormat, ...] = (
    *(file_format(column) for column in COLUMN_KINDS for file_format in _OF_COLUMNS),
    CsvFormat(),
    TsvFormat(),
    MegatronFormat(),
    DEFAULT,
)
_BY_NAME = {file_format.name: file_format for file_format in FORMATS}
assert len(_BY_NAME) == len(FORMATS), "names are unique"  # records of prepared data tell formats apart by name

_TABLES = "Convert it to parquet or jsonl, with the text in its own column."
_TOKEN_FILES = (
    "Tokens are read from lists of ids in parquet, arrow and jsonl files (data.tokens_column), and from Megatron-LM's "
    "datasets (.bin with its .idx)."
)
_UNSUPPORTED = {
    ending: advice
    for endings, advice in (
        (".xls .xlsx .avro .orc .sqlite .sqlite3 .duckdb .lance .tfrecord .mds", _TABLES),
        (".npy .npz .pt .pth .pkl .pickle .safetensors .gguf .h5 .hdf5", _TOKEN_FILES),
        (".tar .zip .7z .rar .tgz", "Unpack it first."),
        (".xz .lzma .bz2 .lz4 .br .z .snappy", "Unpack it first, or compress with gzip or zstd."),
        (".pdf .doc .docx .epub .rtf", "Extract its text first."),
        (".part .partial .crdownload .incomplete .aria2", "Complete the download that was to write it."),
    )
    for ending in endings.split()
}


def own_format(name: str) -> FileFormat:
    """Return a file format of the user's own; RecipeError if it cannot be used."""
    part = own_parts.load_part(
        own_parts.FORMATS,
        "data.formats",
        name,
        "a subclass of hlat.data.formats.base.FileFormat",
        lambda part: isinstance(part, type) and issubclass(part, FileFormat),
    )
    return _named(name, part)


@lru_cache
def _named(name: str, part: type[FileFormat]) -> FileFormat:
    file_format = part()  # one object, so that records of files compare as equal
    file_format.own_name = name
    return file_format


def format_of(file: Path, column: ColumnKind = TEXT_COLUMN, own: Sequence[str] = ()) -> FileFormat:
    """Return the format of a file by its suffix; an unknown suffix is text. ``own`` are formats of the user's own.

    Raises:
        DataError: hlat does not read files of this suffix, or not compressed, or not with a column of this kind.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSED_ENDINGS
    ending = next(iter(suffixes[::-1][compressed:]), "")
    # One format for each kind of column; only one of them accepts the source's column.
    known = (*map(own_format, own), *FORMATS)
    found = [file_format for file_format in known if ending in file_format.endings] or [DEFAULT]
    if compressed and not found[0].compressible:
        raise DataError(
            f"{file}: {found[0].kind} inside {file.suffix} is not read. Decompress the file first; or, if only its "
            f"content is compressed, give it the ending {ending}."
        )
    if ending in _UNSUPPORTED and found == [DEFAULT]:
        raise DataError(
            f"{file}: hlat does not read {ending} files. {_UNSUPPORTED[ending]} If it is not part of the corpus, name "
            "the files that are with a glob such as folder/**/*.txt."
        )
    fitting = [file_format for file_format in found if file_format.accepts(column)]
    if not fitting:
        others = sorted({file_format.kind for file_format in FORMATS if file_format.column is column})
        raise DataError(
            f"{file}: {found[0].kind} files have no column that data.{column.field} could name; those of "
            f"{', '.join(others)} have. Name the text instead, or convert the file."
        )
    return fitting[0]


def folder_format(
    names: Sequence[str], read: Callable[[str], bytes], column: ColumnKind
) -> tuple[FileFormat, list[str]] | None:
    """Return format and files, in order, of a folder that is one data set; None for an ordinary folder.

    ``names`` are relative to the folder, with "/". A DataError continues the name of the folder.
    """
    for file_format in FORMATS:
        if file_format.accepts(column) and (files := file_format.folder_files(names, read)) is not None:
            return file_format, files
    return None


def format_named(name: str) -> FileFormat:
    """Return the format that a record names; DataError if this version has none of this name."""
    if name not in _BY_NAME and own_parts.FORMATS.has(name):
        return own_format(name)
    if name not in _BY_NAME:
        raise DataError(f"{name!r} is not a file format of this version of hlat; it reads {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
