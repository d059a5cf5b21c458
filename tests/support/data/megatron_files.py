"""Datasets of Megatron-LM for tests, written from the format's description."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [], [[], [7, 8, 9, 10]], [[11]]]


def write_megatron(
    data: Path,
    documents: Sequence[Sequence[Sequence[int]]] = DOCUMENTS,
    dtype: str = "uint16",
    *,
    gap: int = 0,
    modes: bool = False,
) -> Path:
    """A dataset of documents of sequences; ``gap`` is bytes between sequences; returns the .bin."""
    sequences = [np.array(sequence, dtype=f"<{np.dtype(dtype).str[1:]}") for parts in documents for sequence in parts]
    firsts = np.cumsum([0, *(len(parts) for parts in documents)])
    begins, content = [], b""
    for number, sequence in enumerate(sequences):
        content += bytes(gap if number else 0)
        begins.append(len(content))
        content += sequence.tobytes()
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(content)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(firsts))
    index += np.array([len(sequence) for sequence in sequences], "<i4").tobytes()
    index += np.array(begins, "<i8").tobytes() + firsts.astype("<i8").tobytes()
    index += bytes(len(sequences) if modes else 0)
    data.with_suffix(".idx").write_bytes(index)
    return data
