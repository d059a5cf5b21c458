"""Samples are a pure function of the global index; an epoch predicts every token once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.order import permute
from hlat.data.samples.training_data import ValidationData
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.preparing import training_data


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """About 12000 training tokens in shards of 997, so that samples cross shard boundaries, some of them two."""
    folder = tmp_path_factory.mktemp("samples")
    file = write_jsonl(folder / "a.jsonl", documents(60, 400))
    section = {"tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0.2}, "shard_tokens": 997}
    return prepare(DataConfig.model_validate({"path": str(file), **section}), folder / "out", workers=1)


_lengths = st.integers(2, 2500)
_fixture = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _tokens(prepared: PreparedData, split: str) -> np.ndarray:
    shards = prepared.manifest.splits[split].shards  # read without the code under test
    return np.concatenate([np.fromfile(prepared.dir / shard.file, dtype="<u2") for shard in shards]).astype(np.int64)


@given(length=_lengths, seed=st.integers(0, 2**32), epoch=st.integers(0, 3), shuffle=st.booleans())
@_fixture
def test_an_epoch_predicts_every_token_once(
    prepared: PreparedData, length: int, seed: int, epoch: int, shuffle: bool
) -> None:
    tokens = _tokens(prepared, "train")
    data = training_data(prepared, length, seed, shuffle)
    n = data.samples_per_epoch
    assert n == (len(tokens) - 1) // length
    batch = data.batch(epoch * n, n)
    assert sorted(batch.sample_ids.tolist()) == list(range(n))
    if not shuffle:
        assert batch.sample_ids.tolist() == list(range(n))
    order = np.argsort(batch.sample_ids)
    assert np.array_equal(batch.labels_BS.numpy()[order].ravel(), tokens[1 : n * length + 1])
    assert np.array_equal(batch.inputs_BS.numpy()[order].ravel(), tokens[: n * length])


@given(
    length=st.integers(2, 300),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 10**5),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@_fixture
def test_samples_do_not_depend_on_the_batches_they_are_read_in(
    prepared: PreparedData, length: int, seed: int, first: int, counts: list[int]
) -> None:
    whole = training_data(prepared, length, seed).batch(first, sum(counts))
    offset = 0
    for count in counts:
        batch = training_data(prepared, length, seed).batch(first + offset, count)
        assert torch.equal(batch.inputs_BS, whole.inputs_BS[offset : offset + count])
        assert torch.equal(batch.labels_BS, whole.labels_BS[offset : offset + count])
        offset += count
    n = training_data(prepared, length, seed).samples_per_epoch
    expected = [int(permute(seed, g // n, [g % n], n)[0]) for g in range(first, first + sum(counts))]
    assert whole.sample_ids.tolist() == expected


def test_batches_have_the_shapes_and_dtypes_of_the_model(prepared: PreparedData) -> None:
    batch = training_data(prepared, 32, 0).batch(0, 4)
    assert batch.inputs_BS.shape == batch.labels_BS.shape == (4, 32)
    assert batch.inputs_BS.dtype == batch.labels_BS.dtype == torch.int64
    assert torch.equal(batch.inputs_BS[:, 1:], batch.labels_BS[:, :-1])
    assert batch.inputs_BS.is_contiguous() and batch.labels_BS.is_contiguous()


@given(length=_lengths)
@_fixture
def test_validation_predicts_every_token_once(prepared: PreparedData, length: int) -> None:
    tokens = _tokens(prepared, "validation")
    data = ValidationData(prepared, length)
    batches = [data.batch(first, 3) for first in range(0, len(data), 3)]
    labels = torch.cat([batch.labels_BS for batch in batches]).ravel().numpy()
    inputs = torch.cat([batch.inputs_BS for batch in batches]).ravel().numpy()
    assert np.array_equal(labels[labels != -100], tokens[1:])
    assert np.array_equal(inputs[labels != -100], tokens[:-1])
    assert (labels[len(tokens) - 1 :] == -100).all()
    assert ((inputs >= 0) & (inputs < prepared.manifest.vocab_size)).all()
    assert sum(data.label_bytes(batch.labels_BS) for batch in batches) == prepared.token_bytes[tokens[1:]].sum()


@given(length=st.integers(1, 200), sequences=st.integers(1, 50))
@_fixture
def test_a_limited_number_of_validation_windows_is_spread_evenly(
    prepared: PreparedData, length: int, sequences: int
) -> None:
    all_windows = ValidationData(prepared, length)
    some = ValidationData(prepared, length, sequences)
    count = min(sequences, len(all_windows))
    assert len(some) == count
    batch = some.batch(0, sequences)
    gaps = np.diff([*batch.sample_ids, len(all_windows)])
    assert batch.sample_ids[0] == 0 and gaps.min() >= 1 and gaps.max() - gaps.min() <= 1
    for row, window in enumerate(batch.sample_ids):
        assert torch.equal(batch.labels_BS[row], all_windows.batch(int(window), 1).labels_BS[0])


def test_bytes_of_labels_add_up_to_the_validation_text(prepared: PreparedData) -> None:
    data = ValidationData(prepared, 64)
    first_token = int(prepared.tokens("validation").read(0, 1)[0])
    total = sum(data.label_bytes(data.batch(i, 1).labels_BS) for i in range(len(data)))
    assert total + prepared.token_bytes[first_token] == prepared.manifest.splits["validation"].text_bytes


def test_too_few_tokens_are_an_error(prepared: PreparedData, tmp_path: Path) -> None:
    tokens = prepared.train_tokens
    assert training_data(prepared, tokens - 1, 0).samples_per_epoch == 1
    with pytest.raises(
        DataError, match=f"{tokens} training tokens are too few for one sample, which takes {tokens + 1}"
    ):
        training_data(prepared, tokens, 0)
    file = write_jsonl(tmp_path / "a.jsonl", documents(5, 400))
    section = {"tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0}}
    without = prepare(DataConfig.model_validate({"path": str(file), **section}), tmp_path / "out", workers=1)
    assert without.validation_tokens == 0
    with pytest.raises(DataError, match="leave nothing to predict"):
        ValidationData(without, 32)


def test_a_source_shorter_than_a_sample_is_refused_only_if_samples_are_drawn_from_it(tmp_path: Path) -> None:
    """Its text is less than a sample. A mixture would draw from it; a corpus whose sources repeat leaves it out."""
    sources = []
    for name, count in (("long", 20), ("short", 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", documents(count, 300))
        sources.append({"name": name, "path": str(tmp_path / f"{name}.jsonl")})
    weighted = [{**source, "weight": 1} for source in sources]
    section = {"sources": sources, "tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0}}
    prepared = prepare(DataConfig.model_validate(section), tmp_path / "out", workers=1)
    repeated = [{**sources[0], "repeat": 2}, sources[1]]
    assert training_data(prepared, 800, 0, sources=repeated).samples_per_epoch > 1
    with pytest.raises(DataError, match="of source short are too few for one sample, which takes 801"):
        training_data(prepared, 800, 0, sources=weighted)
