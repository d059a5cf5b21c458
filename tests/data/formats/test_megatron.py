"""Megatron-LM's .bin and .idx files: documents are read as written; errors name the file and the position."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.data.formats.megatron import MegatronDataset, index_path
from hlat.runtime.errors import DataError
from tests.support.data.megatron_files import DOCUMENTS, write_megatron


def write(
    folder: Path,
    documents: Sequence[Sequence[Sequence[int]]] = DOCUMENTS,
    dtype: str = "uint16",
    gap: int = 0,
    modes: bool = False,
) -> Path:
    """Write a dataset with a fixed name; return the .bin."""
    return write_megatron(folder / "corpus_text_document.bin", documents, dtype, gap=gap, modes=modes)


def joined(documents: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Join the sequences of each document."""
    return [[token for sequence in document for token in sequence] for document in documents]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("gap", [0, 8])
def test_documents_are_read_as_they_were_written(tmp_path: Path, dtype: str, gap: int) -> None:
    dataset = MegatronDataset(write(tmp_path, dtype=dtype, gap=gap))
    assert [dataset.document(number).tolist() for number in range(len(dataset))] == joined(DOCUMENTS)
    assert {dataset.document(number).dtype.name for number in range(len(dataset))} == {dtype}
    assert (len(dataset), dataset.sequences, dataset.tokens) == (5, 6, 11)
    assert dataset.document_lengths().tolist() == [4, 2, 0, 4, 1]
    assert dataset.document_lengths(1, 3).tolist() == [2, 0]


@given(st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=4), max_size=30))
def test_any_dataset_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]
) -> None:
    data = write(tmp_path_factory.mktemp("megatron"), documents, "int32")
    dataset = MegatronDataset(data)
    assert [dataset.document(number).tolist() for number in range(len(dataset))] == joined(documents)
    assert dataset.document_lengths().tolist() == [len(tokens) for tokens in joined(documents)]


def test_documents_are_not_copied_and_cannot_be_changed(tmp_path: Path) -> None:
    dataset = MegatronDataset(write(tmp_path))
    for number in (0, 2):
        with pytest.raises(ValueError, match="read-only"):
            dataset.document(number)[:] = 0
    assert np.shares_memory(dataset.document(0), dataset.document(0))


def test_the_two_files_can_be_in_different_folders(tmp_path: Path) -> None:
    data = write(tmp_path)
    apart = data.with_suffix(".idx").rename(tmp_path / "elsewhere")
    assert len(MegatronDataset(data, apart)) == 5
    assert index_path("s3://bucket/a.bin") == "s3://bucket/a.idx"


def patch(suffix: str, at: int, value: bytes) -> Callable[[Path], None]:
    """Return a function that overwrites bytes of a file."""

    def damage(data: Path) -> None:
        file = data.with_suffix(suffix)
        content = bytearray(file.read_bytes())
        content[at : at + len(value)] = value
        file.write_bytes(content)

    return damage


def cut(suffix: str, by: int) -> Callable[[Path], None]:
    """Return a function that removes the last bytes of a file, or appends bytes if ``by`` is negative."""

    def damage(data: Path) -> None:
        file = data.with_suffix(suffix)
        content = file.read_bytes()
        file.write_bytes(content[:-by] if by > 0 else content + bytes(-by))

    return damage


_LENGTHS, _BEGINS = 34, 34 + 4 * 6
_FIRSTS = _BEGINS + 8 * 6
DAMAGES = [
    (
        lambda data: data.with_suffix(".idx").unlink(),
        r"document\.idx: no such file.*next to its \.bin, this one is missing",
    ),
    (lambda data: data.unlink(), r"document\.bin: no such file.*next to its \.idx, this one is missing"),
    (cut(".idx", 1), r"document\.idx: truncated: 153 bytes, but 6 sequences and 5 documents take 154"),
    (cut(".idx", 130), r"document\.idx: truncated within its header, after 24 bytes"),
    (cut(".idx", 154), r"not an index of Megatron-LM"),
    (cut(".idx", -3), r"document\.idx: longer than its header says: 157 bytes"),
    (cut(".bin", 1), r"document\.bin: truncated: 21 bytes, but sequence 5 of .*document\.idx ends at byte 22"),
    (cut(".bin", 22), r"document\.bin: truncated: 0 bytes, but sequence 0"),
    (cut(".bin", -10), r"document\.bin: 32 bytes, but .*describes only the first 22: they do not belong together"),
    (patch(".idx", 0, b"PAR1"), "it begins like a parquet file"),
    (patch(".idx", 0, b"TNTIDX\x00\x00"), r"older format.*--dataset-impl mmap"),
    (patch(".idx", 9, b"\x02"), "version 2 of the format at byte 9"),
    (patch(".idx", 17, b"\x09"), r"unknown type code 9 at byte 17; known are 1 uint8, .* 8 uint16"),
    (patch(".idx", 17, b"\x07"), "holds floating-point numbers"),
    (patch(".idx", 18, b"\xff" * 7), "truncated: 154 bytes, but"),
    (patch(".idx", 26, bytes(8)), "no entry"),
    (patch(".idx", _LENGTHS + 4, struct.pack("<i", -1)), r"sequence 1: -1 tokens at byte 6"),
    (patch(".idx", _LENGTHS + 20, struct.pack("<i", 2**31 - 1)), r"truncated: 22 bytes, but sequence 5"),
    (patch(".idx", _BEGINS + 8, struct.pack("<q", -2)), r"sequence 1: 1 tokens at byte -2"),
    (
        patch(".idx", _BEGINS + 8, struct.pack("<q", 7)),
        r"sequence 1: 1 tokens at byte 7, which is not a valid range of",
    ),
    (patch(".idx", _BEGINS + 8, struct.pack("<q", 2**63 - 2)), r"sequence 1: 1 tokens at byte 9223372036854775806"),
    (patch(".idx", _FIRSTS + 8, struct.pack("<q", 4)), r"document 1: begins at sequence 4 and ends at 3, before"),
    (patch(".idx", _FIRSTS, struct.pack("<q", 1)), r"sequences 1 to 6, but the dataset has 0 to 6"),
    (patch(".idx", _FIRSTS + 40, struct.pack("<q", 7)), r"sequences 0 to 7, but the dataset has 0 to 6"),
    (patch(".idx", _FIRSTS, struct.pack("<q", -1)), r"sequences -1 to 6"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    data = write(tmp_path)
    damage(data)
    with pytest.raises(DataError, match=message):
        MegatronDataset(data)


def test_datasets_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multimodal"):
        MegatronDataset(write(tmp_path, modes=True))
    with pytest.raises(DataError, match="floating-point"):
        MegatronDataset(write(tmp_path, dtype="float32"))


def test_entries_beyond_the_first_chunk_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hlat.data.formats.megatron._CHECK_ENTRIES", 2)
    for damage, message in DAMAGES[16:]:
        data = write(tmp_path)
        damage(data)
        with pytest.raises(DataError, match=message):
            MegatronDataset(data)
    assert len(MegatronDataset(write(tmp_path))) == 5
