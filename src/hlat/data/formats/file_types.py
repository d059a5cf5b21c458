"""The ending of a file -> how it is read."""

from pathlib import Path

from hlat.runtime import DataError

PARQUET, ARROW, JSON, TEXT, MEGATRON = "parquet", "arrow", "jsonl", "text", "megatron"
_ENDINGS = {
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
_COMPRESSED = {".gz", ".zst"}
_REFUSED = {
    ".csv": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".tsv": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".xls": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".xlsx": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".avro": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".orc": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".sqlite": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".npy": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".npz": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".pt": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".pkl": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".safetensors": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".h5": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
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
    """How a file is read, from its ending; an ending that is not known is text.

    Raises:
        DataError: an ending that is known not to be text, or that is not read compressed.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
        if suffixes and _ENDINGS.get(suffixes[-1]) in (PARQUET, ARROW, MEGATRON):
            kind = _ENDINGS[suffixes[-1]]
            raise DataError(f"{file}: {kind} inside {file.suffix} is not read; decompress the file first")
    if suffixes and suffixes[-1] in _REFUSED:
        remedy = _REFUSED[suffixes[-1]]
        raise DataError(
            f"{file}: {suffixes[-1]} files are not a corpus that hlat reads. {remedy} Where it is not meant, name "
            "the files that are with a glob such as folder/**/*.txt."
        )
    return _ENDINGS.get(suffixes[-1], TEXT) if suffixes else TEXT
