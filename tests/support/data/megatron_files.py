"""Writer of Megatron-LM datasets for tests, from the description of the format."""

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
    """Write a dataset of documents of sequences, and return the .bin.

    Args:
        data: path of the .bin.
        documents: token ids by document and sequence.
        dtype: dtype of the tokens.
        gap: zero bytes between sequences.
        modes: write the table of modalities, which makes the dataset multimodal.
    """
    sequences = [
        np.array(sequence, dtype=f"<{np.dtype(dtype).str[1:]}") for document in documents for sequence in document
    ]
    firsts = np.cumsum([0, *(len(document) for document in documents)])
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
