"""Duplicates and unreadable rows are left out and counted, and partitions merge to the same bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hlat.config.sections.data import DataConfig
from hlat.data.prepare import preparation
from hlat.data.prepare.partitions import merge_partition_folders, prepare_partition, split_files
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.verification import verify_data
from hlat.data.prepare.work_units import DuplicateFinder, hash_documents
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.training import train_bpe
from hlat.runtime.errors import DataError
from tests.support.data.corpora import tree
from tests.support.data.preparation_model import BAD, TEXTS, check, corpora, expected, tokenize_here, write


@pytest.fixture(scope="module", autouse=True)
def tiny_units() -> Iterator[None]:
    """Units of a few documents, tokenized in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", 60)
        tokenize_here(patch)
        yield


@pytest.fixture(scope="module")
def given_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A tokenizer of 280 tokens, and its folder."""
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    tokenizer = train_bpe(TEXTS * 3, 280)
    tokenizer.save(folder)
    return folder, tokenizer


def _config(named: list[dict[str, Any]], path: Path, **more: Any) -> DataConfig:
    section = {"sources": named, "tokenizer": {"path": str(path)}, "shard_tokens": 40, "unreadable_rows": 0.99}
    return DataConfig.model_validate(section | {"validation": {"fraction": 0}} | more)


@settings(max_examples=20)
@given(
    sources=corpora(),
    duplicates=st.sampled_from(["keep", "drop"]),
    validation=st.sampled_from(
        [
            {"fraction": 0},
            {"fraction": 0.5, "by": "document"},
            {"fraction": 0.4, "by": "tail"},
            {"fraction": 0.01, "by": "auto"},  # tests/data/test_small_corpora.py has its reference
        ]
    ),
    parts=st.integers(1, 3),
)
def test_every_token_is_accounted_for_prepared_at_once_and_in_partitions(
    given_tokenizer: tuple[Path, Tokenizer],
    sources: list[list[list[str | bytes | None]]],
    duplicates: str,
    validation: dict[str, Any],
    parts: int,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = _config(
            write(folder / "corpus", sources), given_tokenizer[0], duplicates=duplicates, validation=validation
        )
        wanted = expected(sources, config, given_tokenizer[1])
        is_auto = validation.get("by") == "auto"
        assume(wanted.documents["train"] and (is_auto or wanted.documents["validation"] or not validation["fraction"]))
        whole = prepare(config, folder / "whole")
        if not is_auto:
            check(whole, sources, wanted)
        folders = [folder / f"part {number}" for number in range(1, parts + 1)]
        for number, out in enumerate(folders, 1):
            prepare_partition(config, out, number, parts)
        merge_partition_folders(config, folder / "merged", reversed(folders))
        assert tree(folder / "merged") == tree(folder / "whole")
        verify_data(folder / "merged", config)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_partitions_hold_all_files_in_order_and_about_equal_bytes(sizes: list[int], parts: int) -> None:
    ranges = split_files(sizes, parts)
    assert [index for file_range in ranges for index in file_range] == list(range(len(sizes))) and len(ranges) == parts
    for file_range in ranges:
        assert sum(sizes[index] for index in file_range) <= sum(sizes) / parts + max(sizes, default=0)


# --- duplicates ----------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20)), st.integers(1, 40))
def test_the_duplicate_finder_is_exact_when_halves_of_hashes_are_equal(
    batches: list[list[tuple[int, int]]], largest: int
) -> None:
    """Also of hashes that are zero, or have zero bytes at their ends."""
    finder, earlier = DuplicateFinder(largest), set[bytes]()
    for batch in batches:
        expected_mask, hashes = [], [first.to_bytes(8, "little") + last.to_bytes(8, "big") for first, last in batch]
        for each in hashes:
            expected_mask.append(each in earlier)
            earlier.add(each)
        assert finder.add(np.frombuffer(b"".join(hashes), dtype="S16")).tolist() == expected_mask


def test_the_duplicate_finder_stores_sixteen_bytes_per_document_in_few_runs() -> None:
    finder = DuplicateFinder(largest=40_000)
    for start in range(0, 100_000, 1_000):
        hashes = hash_documents([f"{number}".encode() for number in range(start, start + 1_000)])
        assert not finder.add(hashes).any() and finder.add(hashes[::7]).all()
    assert sum(run.nbytes for run in finder._runs) == 1_600_000 and len(finder._runs) < 12
    assert all((run[1:] >= run[:-1]).all() for run in finder._runs)


def test_duplicates_between_corpus_and_validation_text_are_dropped(
    given_tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    """A separate validation file comes last, so it loses the documents that the corpus has too."""
    named = write(tmp_path / "corpus", [[TEXTS[:3]], [[TEXTS[0], TEXTS[4]]]])
    more = {"validation": {"path": named[1]["path"]}, "duplicates": "drop"}
    config = _config(named[:1], given_tokenizer[0], **more)
    prepared = prepare(config, tmp_path / "out")
    assert [prepared.manifest.splits[split].documents for split in ("train", "validation")] == [3, 1]
    assert [(source.name, source.copies) for source in prepared.manifest.rows] == [("source 0", 0), ("validation", 1)]
    assert "1 of 5 documents are exact copies of earlier ones and were left out." in prepared.notes
    write(tmp_path / "same", [[TEXTS[:3]]])
    same = _config(named[:1], given_tokenizer[0], **more | {"validation": {"path": str(tmp_path / "same")}})
    with pytest.raises(DataError, match="every document in it is null or empty or a duplicate of one in the corpus"):
        prepare(same, tmp_path / "other")


def test_a_tokenizer_is_not_trained_on_dropped_duplicates(tmp_path: Path) -> None:
    once = write(tmp_path / "once", [[TEXTS]])
    often = write(tmp_path / "often", [[TEXTS + [TEXTS[3]] * 50]])
    trained = {"tokenizer": {"vocab_size": 270}}
    results = [
        prepare(_config(named, tmp_path, **trained, duplicates=duplicates), tmp_path / name)
        for name, named, duplicates in (("a", once, "drop"), ("b", often, "drop"), ("c", often, "keep"))
    ]
    assert results[0].fingerprint == results[1].fingerprint
    assert results[1].manifest.tokenizer_sha256 != results[2].manifest.tokenizer_sha256


# --- unreadable rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", BAD)
def test_the_first_unreadable_row_is_an_error_if_none_is_allowed(
    given_tokenizer: tuple[Path, Tokenizer], tmp_path: Path, line: bytes
) -> None:
    named = write(tmp_path / "corpus", [[["fine"], ["fine", line, *BAD]]])
    with pytest.raises(DataError, match=r"0/1\.jsonl, line 2: .*Or set data\.unreadable_rows to the share"):
        prepare(_config(named, given_tokenizer[0], unreadable_rows=0), tmp_path / "out")


def test_the_limit_on_unreadable_rows_is_checked_at_the_end_and_a_larger_limit_resumes(
    given_tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    rows: list[str | bytes | None] = [f"text {number}" for number in range(95)]
    rows[3:3], rows[50:50] = [BAD[0], BAD[1]], [BAD[2], BAD[3], BAD[4]]
    named, out = write(tmp_path / "corpus", [[rows]]), tmp_path / "out"

    def config(share: float) -> DataConfig:
        return _config(named, given_tokenizer[0], unreadable_rows=share)

    with pytest.raises(DataError, match=r"5 of 100 rows in all.*allows 0\.0499.*\n.*line 4: .*\n.*line 5: ") as caught:
        prepare(config(0.0499), out)
    assert "data.unreadable_rows=0.05," in str(caught.value)
    units = {file: file.read_bytes() for file in (out / "partial" / "units").glob("*.json")}
    assert len(units) > 3
    prepared = prepare(config(0.05), out)
    assert prepared.manifest.total("unreadable_rows") == 5
    assert prepare(config(0.2), out).fingerprint == prepared.fingerprint
    with pytest.raises(
        DataError, match=r"prepared without 5 of 100 rows that cannot be read, now a share of 0\.01 is allowed"
    ):
        prepare(config(0.01), out)


def test_a_mostly_unreadable_corpus_fails_early_and_at_the_same_row(
    given_tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    rows: list[str | bytes | None] = [*(f"text {number}" for number in range(100)), *[BAD[0]] * 1000]
    named, out = write(tmp_path / "corpus", [[rows]]), tmp_path / "out"
    for share in (0.01, 0.3, 0.01):
        with pytest.raises(DataError, match="100 of 200 rows so far"):
            prepare(_config(named, given_tokenizer[0], unreadable_rows=share), out)
    with pytest.raises(DataError, match="100 of 200 rows so far"):
        prepare_partition(_config(named, given_tokenizer[0], unreadable_rows=0.3), tmp_path / "part", 1, 1)
