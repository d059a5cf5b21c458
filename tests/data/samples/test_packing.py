"""Every token is accounted for: once, or as padding; where documents are isolated nothing crosses their ends."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlat.config.sections import DataConfig
from hlat.data.prepare import prepare
from hlat.data.prepared import PreparedData
from hlat.data.samples import ValidationData, fit_documents
from hlat.data.samples.packed_rows import BestFitRows, RowReader
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.preparing import training_data

_fixture = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def _bins_of_the_textbook(sizes: list[int], room: int) -> int:
    """Best-fit decreasing, one piece at a time: how many bins it opens."""
    left: list[int] = []
    for size in sorted((size % room for size in sizes if size % room), reverse=True):
        fitting = [place for place, space in enumerate(left) if space >= size]
        if fitting:
            best = min(fitting, key=left.__getitem__)
            left[best] -= size
        else:
            left.append(room - size)
    return len(left) + sum(size // room for size in sizes)


@given(sizes=st.lists(st.integers(0, 150), max_size=80), room=st.integers(1, 60))
def test_fitting_loses_nothing_and_is_the_textbooks(sizes: list[int], room: int) -> None:
    fitted = fit_documents(sizes, room)
    taken = [np.zeros(size, dtype=int) for size in sizes]
    for document, offset, length in zip(fitted.documents, fitted.offsets, fitted.lengths, strict=True):
        taken[document][offset : offset + length] += 1
        assert length == min(room, sizes[document] - offset)  # cut only where a row is full
    assert all((one == 1).all() for one in taken)
    used = np.add.reduceat(fitted.lengths, fitted.rows[:-1]) if len(fitted.rows) > 1 else np.zeros(0)
    assert (used <= room).all() and (np.diff(fitted.rows) > 0).all()
    assert len(fitted.rows) - 1 == _bins_of_the_textbook(sizes, room)


class _Numbered:
    """Tokens that are their own place, counted from 1: padding is 0."""

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start + 1, stop + 1)

    def read_into(self, start: int, out: np.ndarray) -> None:
        out[:] = self.read(start, start + len(out))


@given(sizes=st.lists(st.integers(1, 150), min_size=1, max_size=40), room=st.integers(2, 60), isolate=st.booleans())
def test_every_label_is_what_follows_its_token(sizes: list[int], room: int, isolate: bool) -> None:
    """Inside a document its next token, in another row too; after its last one the first of a document that begins
    there, unless documents are isolated; never a token from the middle of another document.
    """
    starts = np.cumsum([0, *sizes]).astype(np.uint64)
    rows = BestFitRows(starts, 0, fit_documents(sizes, room))
    reader = RowReader(_Numbered(), room, starts if isolate else None)  # type: ignore[arg-type]
    read = reader.read([rows.token_ranges(row) for row in range(len(rows))])
    firsts = {start + 1 for start in starts.tolist()}
    for inputs, labels in zip(read.inputs_BS.tolist(), read.labels_BS.tolist(), strict=True):
        for token, label, beside in zip(inputs, labels, [*inputs[1:], 0], strict=True):
            if token and token + 1 not in firsts:
                assert label == token + 1
            else:
                assert label == (beside if token and beside in firsts and not isolate else -100)


@given(length=st.integers(2, 900), seed=st.integers(0, 2**32), isolate=st.booleans(), epoch=st.integers(0, 2))
@_fixture
def test_best_fit_accounts_for_every_token(
    prepared: PreparedData, length: int, seed: int, isolate: bool, epoch: int
) -> None:
    data = training_data(prepared, length, seed, packing="best-fit", isolate=isolate)
    n = data.samples_per_epoch
    batch = data.batch(epoch * n, n)
    (waste,) = data.waste
    tokens, starts = _tokens(prepared), prepared.document_boundaries("train").astype(np.int64)
    assert waste.positions == n * length
    assert waste.padding == n * length - len(tokens)
    assert waste.cut == int((np.diff(starts) > length).sum()) and waste.documents == len(starts) - 1
    # Inputs but for the padding, which is the id 0, are the tokens of the corpus, each as often as there.
    found = np.bincount(batch.inputs_BS.numpy().ravel(), minlength=300)
    found[0] -= waste.padding
    assert np.array_equal(found, np.bincount(tokens, minlength=300))
    labels = batch.labels_BS.numpy()
    # A document gives a label for all of its tokens but the first, also where it is cut.
    expected = len(tokens) - waste.documents
    if isolate:
        assert (labels != -100).sum() == expected
    else:
        assert (labels != -100).sum() >= expected


@given(length=st.integers(2, 900), seed=st.integers(0, 2**32), packing=_packings)
@_fixture
def test_isolated_documents_see_and_predict_only_themselves(
    prepared: PreparedData, length: int, seed: int, packing: str
) -> None:
    """Every row is taken apart at the zeros of its positions; each part must be a stretch of one document."""
    data = training_data(prepared, length, seed, packing=packing, isolate=True)
    tokens, starts = _tokens(prepared), prepared.document_boundaries("train").astype(np.int64)
    corpus = [_spelled(tokens[start:stop].tolist()) for start, stop in pairwise(starts)]
    batch = data.batch(0, min(data.samples_per_epoch, 40))
    assert batch.positions_BS is not None
    rows = zip(batch.inputs_BS.tolist(), batch.labels_BS.tolist(), batch.positions_BS.tolist(), strict=True)
    for inputs, labels, positions in rows:
        bounds = [place for place, position in enumerate(positions) if position == 0] + [length]
        assert bounds[0] == 0
        for start, stop in pairwise(bounds):
            part, wanted = inputs[start:stop], labels[start:stop]
            assert positions[start:stop] == list(range(stop - start))
            assert [label for label in wanted[:-1] if label != -100] in ([], part[1:])  # [] is padding
            whole = part + ([wanted[-1]] if wanted[-1] != -100 else [])
            if any(label != -100 for label in wanted):
                assert any(_spelled(whole) in document for document in corpus)


def _spelled(tokens: list[int]) -> str:
    """A character for each token, so that stretches can be searched for."""
    return "".join(map(chr, tokens))


@given(length=st.integers(2, 900), seed=st.integers(0, 2**32))
@_fixture
def test_isolation_changes_no_token_and_takes_only_labels_across_ends(
    prepared: PreparedData, length: int, seed: int
) -> None:
    joined = training_data(prepared, length, seed).batch(3, 20)
    alone = training_data(prepared, length, seed, isolate=True).batch(3, 20)
    assert joined.positions_BS is None and alone.positions_BS is not None
    assert np.array_equal(joined.inputs_BS, alone.inputs_BS)
    starts = set(prepared.document_boundaries("train").tolist())
    for row, sample in enumerate(alone.sample_ids.tolist()):
        places = [sample * length + place + 1 for place in range(length)]
        expected = [-100 if place in starts else int(joined.labels_BS[row, i]) for i, place in enumerate(places)]
        assert alone.labels_BS[row].tolist() == expected


def test_validation_isolates_too(prepared: PreparedData) -> None:
    joined, alone = ValidationData(prepared, 64), ValidationData(prepared, 64, isolate=True)
    a, b = joined.batch(0, len(joined)), alone.batch(0, len(alone))
    missing = int((a.labels_BS != -100).sum() - (b.labels_BS != -100).sum())
    assert missing == prepared.manifest.splits["validation"].documents - 1
    assert b.positions_BS is not None and np.array_equal(a.inputs_BS, b.inputs_BS)


def test_the_plan_is_made_once_and_made_again_where_it_cannot_be_kept(prepared: PreparedData) -> None:
    def rows() -> list[np.ndarray]:
        data = training_data(prepared, 77, 0, packing="best-fit")
        batch = data.batch(0, data.samples_per_epoch)
        return [batch.inputs_BS.numpy(), batch.labels_BS.numpy()]

    first, folder = rows(), prepared.dir / "rows"
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    assert len([path for path in kept if "best-fit-77-" in str(path)]) == 4
    assert all(np.array_equal(a, b) for a, b in zip(rows(), first, strict=True))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == kept
    folder.rename(prepared.dir / "kept")
    Path(folder).write_text("in the way")  # for root, too, no folder can be made here
    try:
        assert all(np.array_equal(a, b) for a, b in zip(rows(), first, strict=True))
    finally:
        folder.unlink()
        (prepared.dir / "kept").rename(folder)
