"""Packing: every token occurs once, the rest is padding; isolated documents share no labels across their ends."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.packed_rows import BestFitRows, RowReader
from hlat.data.samples.packing import fit_documents
from hlat.data.samples.training_data import ValidationData
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.preparing import training_data

_fixture = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
_packings = st.sampled_from(["concat", "best-fit"])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """About 12000 training tokens in shards of 997."""
    folder = tmp_path_factory.mktemp("packing")
    file = write_jsonl(folder / "a.jsonl", documents(60, 400))
    section = {"tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0.2}, "shard_tokens": 997}
    return prepare(DataConfig.model_validate({"path": str(file), **section}), folder / "out", workers=1)


def _tokens(prepared: PreparedData, split: str = "train") -> np.ndarray:
    shards = prepared.manifest.splits[split].shards  # read without the code under test
    return np.concatenate([np.fromfile(prepared.dir / shard.file, dtype="<u2") for shard in shards]).astype(np.int64)


def _textbook_bin_count(sizes: list[int], room: int) -> int:
    """Count the bins of best-fit decreasing, placing one piece at a time."""
    left: list[int] = []
    for size in sorted((size % room for size in sizes if size % room), reverse=True):
        fitting = [number for number, space in enumerate(left) if space >= size]
        if fitting:
            best = min(fitting, key=left.__getitem__)
            left[best] -= size
        else:
            left.append(room - size)
    return len(left) + sum(size // room for size in sizes)


@given(sizes=st.lists(st.integers(0, 150), max_size=80), room=st.integers(1, 60))
def test_best_fit_loses_no_token_and_uses_as_few_rows_as_the_textbook(sizes: list[int], room: int) -> None:
    plan = fit_documents(sizes, room)
    taken = [np.zeros(size, dtype=int) for size in sizes]
    for document, offset, length in zip(plan.documents, plan.offsets, plan.lengths, strict=True):
        taken[document][offset : offset + length] += 1
        assert length == min(room, sizes[document] - offset)  # cut only where a row is full
    assert all((counts == 1).all() for counts in taken)
    used = np.add.reduceat(plan.lengths, plan.rows[:-1]) if len(plan.rows) > 1 else np.zeros(0)
    assert (used <= room).all() and (np.diff(plan.rows) > 0).all()
    assert len(plan.rows) - 1 == _textbook_bin_count(sizes, room)


class _NumberedTokens:
    """Tokens equal to their own position plus 1, so that padding is 0."""

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start + 1, stop + 1)

    def read_into(self, start: int, out: np.ndarray) -> None:
        out[:] = self.read(start, start + len(out))


@given(sizes=st.lists(st.integers(1, 150), min_size=1, max_size=40), room=st.integers(2, 60), isolate=st.booleans())
def test_every_label_is_the_token_that_follows(sizes: list[int], room: int, isolate: bool) -> None:
    """The label of a token inside a document is its next token, even if that is in another row.

    The label of a document's last token is the first token of the next document in the row, unless documents are
    isolated; it is never a token from the middle of another document.
    """
    starts = np.cumsum([0, *sizes]).astype(np.uint64)
    rows = BestFitRows(starts, 0, fit_documents(sizes, room))
    reader = RowReader(_NumberedTokens(), room, starts if isolate else None)  # type: ignore[arg-type]
    read = reader.read([rows.token_ranges(row) for row in range(len(rows))])
    firsts = {start + 1 for start in starts.tolist()}
    for inputs, labels in zip(read.inputs_BS.tolist(), read.labels_BS.tolist(), strict=True):
        for token, label, following in zip(inputs, labels, [*inputs[1:], 0], strict=True):
            if token and token + 1 not in firsts:
                assert label == token + 1
            else:
                assert label == (following if token and following in firsts and not isolate else -100)


@given(length=st.integers(2, 900), seed=st.integers(0, 2**32), isolate=st.booleans(), epoch=st.integers(0, 2))
@_fixture
def test_best_fit_accounts_for_every_token(
    prepared: PreparedData, length: int, seed: int, isolate: bool, epoch: int
) -> None:
    data = training_data(prepared, length, seed, packing="best-fit", isolate=isolate)
    n = data.samples_per_epoch
    batch = data.batch(epoch * n, n)
    waste = data.waste
    assert waste is not None
    tokens, starts = _tokens(prepared), prepared.document_boundaries("train").astype(np.int64)
    assert waste.positions == n * length
    assert waste.padding == n * length - len(tokens)
    assert waste.cut == int((np.diff(starts) > length).sum()) and waste.documents == len(starts) - 1
    # Inputs without padding (id 0) are the tokens of the corpus, each with the same count.
    found = np.bincount(batch.inputs_BS.numpy().ravel(), minlength=300)
    found[0] -= waste.padding
    assert np.array_equal(found, np.bincount(tokens, minlength=300))
    labels = batch.labels_BS.numpy()
    # A document yields a label for each of its tokens but the first, even if it is cut.
    expected = len(tokens) - waste.documents
    if isolate:
        assert (labels != -100).sum() == expected
    else:
        assert (labels != -100).sum() >= expected


@given(length=st.integers(2, 900), seed=st.integers(0, 2**32), packing=_packings)
@_fixture
def test_isolated_documents_attend_to_and_predict_only_themselves(
    prepared: PreparedData, length: int, seed: int, packing: str
) -> None:
    """Every row is divided at the zeros of its positions; each segment must be a range of one document."""
    data = training_data(prepared, length, seed, packing=packing, isolate=True)
    tokens, starts = _tokens(prepared), prepared.document_boundaries("train").astype(np.int64)
    corpus = [_as_text(tokens[start:stop].tolist()) for start, stop in pairwise(starts)]
    batch = data.batch(0, min(data.samples_per_epoch, 40))
    assert batch.positions_BS is not None
    rows = zip(batch.inputs_BS.tolist(), batch.labels_BS.tolist(), batch.positions_BS.tolist(), strict=True)
    for inputs, labels, positions in rows:
        bounds = [index for index, position in enumerate(positions) if position == 0] + [length]
        assert bounds[0] == 0
        for start, stop in pairwise(bounds):
            segment, wanted = inputs[start:stop], labels[start:stop]
            assert positions[start:stop] == list(range(stop - start))
            assert [label for label in wanted[:-1] if label != -100] in ([], segment[1:])  # [] for padding
            with_label = segment + ([wanted[-1]] if wanted[-1] != -100 else [])
            if any(label != -100 for label in wanted):
                assert any(_as_text(with_label) in document for document in corpus)


def _as_text(tokens: list[int]) -> str:
    """Encode each token as a character, so that ranges of tokens can be searched for."""
    return "".join(map(chr, tokens))


@given(length=st.integers(2, 900), seed=st.integers(0, 2**32))
@_fixture
def test_isolation_changes_no_token_and_removes_only_labels_across_document_ends(
    prepared: PreparedData, length: int, seed: int
) -> None:
    joined = training_data(prepared, length, seed).batch(3, 20)
    isolated = training_data(prepared, length, seed, isolate=True).batch(3, 20)
    assert joined.positions_BS is None and isolated.positions_BS is not None
    assert np.array_equal(joined.inputs_BS, isolated.inputs_BS)
    starts = set(prepared.document_boundaries("train").tolist())
    for row, sample in enumerate(isolated.sample_ids.tolist()):
        positions = [sample * length + position + 1 for position in range(length)]
        expected = [
            -100 if position in starts else int(joined.labels_BS[row, i]) for i, position in enumerate(positions)
        ]
        assert isolated.labels_BS[row].tolist() == expected


def test_validation_documents_are_isolated_too(prepared: PreparedData) -> None:
    joined, isolated = ValidationData(prepared, 64), ValidationData(prepared, 64, isolate=True)
    a, b = joined.batch(0, len(joined)), isolated.batch(0, len(isolated))
    missing = int((a.labels_BS != -100).sum() - (b.labels_BS != -100).sum())
    assert missing == prepared.manifest.splits["validation"].documents - 1
    assert b.positions_BS is not None and np.array_equal(a.inputs_BS, b.inputs_BS)


def test_the_packing_plan_is_stored_once_and_recomputed_if_it_cannot_be_stored(prepared: PreparedData) -> None:
    def rows() -> list[np.ndarray]:
        data = training_data(prepared, 77, 0, packing="best-fit")
        batch = data.batch(0, data.samples_per_epoch)
        return [batch.inputs_BS.numpy(), batch.labels_BS.numpy()]

    first, folder = rows(), prepared.dir / "rows"
    stored = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    assert len([path for path in stored if "best-fit-77-" in str(path)]) == 4
    assert all(np.array_equal(a, b) for a, b in zip(rows(), first, strict=True))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == stored
    folder.rename(prepared.dir / "kept")
    Path(folder).write_text("in the way")  # a file in place of the folder stops even root from writing
    try:
        assert all(np.array_equal(a, b) for a, b in zip(rows(), first, strict=True))
    finally:
        folder.unlink()
        (prepared.dir / "kept").rename(folder)
