"""File types by suffix: which files hlat reads, and how."""

from pathlib import Path

from hlat.runtime import DataError

PARQUET, ARROW, JSON, TEXT, MEGATRON = "parquet", "arrow", "jsonl", "text", "megatron"
_TYPES = {
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".ipc": ARROW,
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
    ".bin": MEGATRON,
    ".idx": MEGATRON,
}
_TABLES = "Convert it to parquet or jsonl, with the text in its own column."
_TOKEN_FILES = (
    "The only files of tokens that hlat reads are Megatron-LM's (.bin with its .idx); otherwise give the text."
)
_COMPRESSED = {".gz", ".zst"}
_UNSUPPORTED = {
    ".csv": _TABLES,
    ".tsv": _TABLES,
    ".xls": _TABLES,
    ".xlsx": _TABLES,
    ".avro": _TABLES,
    ".orc": _TABLES,
    ".sqlite": _TABLES,
    ".npy": _TOKEN_FILES,
    ".npz": _TOKEN_FILES,
    ".pt": _TOKEN_FILES,
    ".pkl": _TOKEN_FILES,
    ".safetensors": _TOKEN_FILES,
    ".h5": _TOKEN_FILES,
    ".tar": "Unpack it first.",
    ".zip": "Unpack it first.",
    ".7z": "Unpack it first.",
    ".rar": "Unpack it first.",
    ".tgz": "Unpack it first.",
    ".xz": "Unpack it first, or compress with gzip or zstd.",
    ".bz2": "Unpack it first, or compress with gzip or zstd.",
    ".lz4": "Unpack it first, or compress with gzip or zstd.",
    ".pdf": "Extract its text first.",
    ".docx": "Extract its text first.",
    ".epub": "Extract its text first.",
}


def file_type(file: Path) -> str:
    """Return the type of a file by its suffix; an unknown suffix is text.

    Raises:
        DataError: the suffix is of a file type that hlat does not read, or does not read compressed.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
        if suffixes and _TYPES.get(suffixes[-1]) in (PARQUET, ARROW, MEGATRON):
            inner = _TYPES[suffixes[-1]]
            raise DataError(f"{file}: {inner} inside {file.suffix} is not read; decompress the file first")
    if suffixes and suffixes[-1] in _UNSUPPORTED:
        remedy = _UNSUPPORTED[suffixes[-1]]
        raise DataError(
            f"{file}: hlat does not read {suffixes[-1]} files. {remedy} If it is not part of the corpus, name the "
            "files that are with a glob such as folder/**/*.txt."
        )
    return _TYPES.get(suffixes[-1], TEXT) if suffixes else TEXT
