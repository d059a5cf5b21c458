"""Sources mixed by weights, repeats and phases have the configured shares, or are refused with the missing amount."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.preparing import training_data

_fixture = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
_NAMES = ("books", "code", "web")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, list[dict[str, Any]]]:
    """Three sources of different sizes, and their entries in a recipe."""
    folder = tmp_path_factory.mktemp("weights")
    sizes = {"books": 40, "code": 15, "web": 25}
    files = [write_jsonl(folder / f"{name}.jsonl", documents(count, 300)) for name, count in sizes.items()]
    sources = [{"path": str(file), "name": name} for file, name in zip(files, _NAMES, strict=True)]
    section = {"tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0.1}, "sources": sources}
    return prepare(DataConfig.model_validate(section), folder / "out", workers=1), sources


def _source_of(prepared: PreparedData, length: int, samples: np.ndarray, packing: str = "concat") -> np.ndarray:
    """Return the source of each row, where each source has its own rows."""
    assert packing == "concat"
    rows = [(record.tokens - 1) // length for record in prepared.manifest.splits["train"].sources]
    return np.searchsorted(np.cumsum(rows), samples, side="right")


@given(
    weights=st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any),
    length=st.integers(2, 60),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 10**6),
    shuffle=st.booleans(),
)
@_fixture
def test_samples_come_from_the_sources_of_the_mixture(
    corpus: tuple[PreparedData, list[dict[str, Any]]],
    weights: list[int],
    length: int,
    seed: int,
    first: int,
    shuffle: bool,
) -> None:
    prepared, sources = corpus
    named = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]
    data = training_data(prepared, length, seed, shuffle, sources=named)
    found = _source_of(prepared, length, data.sample_ids(np.arange(first, first + 200)))
    assert data.mixture is not None
    expected, ordinals = data.mixture.locate(np.arange(first, first + 200))
    assert np.array_equal(found, expected)
    # Within a source every row occurs once per epoch.
    n = [(record.tokens - 1) // length for record in prepared.manifest.splits["train"].sources]
    for source in np.unique(found):
        rows_of_source = data.sample_ids(np.arange(first, first + 200))[found == source]
        epochs = ordinals[found == source]
        for epoch in np.unique(epochs // n[source]):
            rows = rows_of_source[epochs // n[source] == epoch]
            assert len(np.unique(rows)) == len(rows)


@given(length=st.integers(2, 60), seed=st.integers(0, 2**32), epoch=st.integers(0, 2))
@_fixture
def test_a_source_occurs_as_often_as_repeated_in_an_epoch(
    corpus: tuple[PreparedData, list[dict[str, Any]]], length: int, seed: int, epoch: int
) -> None:
    """HLAT-70B repeated five of its sources twice per epoch."""
    prepared, sources = corpus
    named = [{**source, "repeat": times} for source, times in zip(sources, (2.0, 1.0, 0.5), strict=True)]
    data = training_data(prepared, length, seed, sources=named)
    rows = [(record.tokens - 1) // length for record in prepared.manifest.splits["train"].sources]
    n = data.samples_per_epoch
    assert n == 2 * rows[0] + rows[1] + rows[2] // 2
    seen = np.bincount(data.sample_ids(np.arange(epoch * n, (epoch + 1) * n)), minlength=sum(rows))
    assert (seen[: rows[0]] == 2).all() and (seen[rows[0] : rows[0] + rows[1]] == 1).all()
    assert seen[rows[0] + rows[1] :].sum() == rows[2] // 2


def test_a_phase_changes_the_mixture_at_its_token(corpus: tuple[PreparedData, list[dict[str, Any]]]) -> None:
    prepared, sources = corpus
    phases = [{"until_tokens": 3000, "weights": {"web": 1}}, {"weights": {"books": 1, "code": 3}}]
    data = training_data(prepared, 10, 0, sources=sources, phases=phases)
    found = _source_of(prepared, 10, data.sample_ids(np.arange(700)))
    assert (found[:300] == 2).all()
    assert np.bincount(found[300:], minlength=3).tolist() == [100, 300, 0]


def test_max_tokens_limits_a_source_to_its_first_tokens(corpus: tuple[PreparedData, list[dict[str, Any]]]) -> None:
    prepared, sources = corpus
    capped = [{**source, "max_tokens": 500} if i == 1 else source for i, source in enumerate(sources)]
    records = prepared.manifest.splits["train"].sources
    data = training_data(prepared, 10, 0, sources=capped)
    assert data.samples_per_epoch == (records[0].tokens - 1) // 10 + 49 + (records[2].tokens - 1) // 10
    start = records[0].tokens
    tokens = prepared.tokens("train").read(start, start + 500)
    rows = data.sample_ids(np.arange(data.samples_per_epoch))
    first = (records[0].tokens - 1) // 10
    batch = data.batch(0, data.samples_per_epoch)
    ours = [i for i, row in enumerate(rows.tolist()) if first <= row < first + 49]
    assert sorted(batch.inputs_BS[ours].flatten().tolist()) == sorted(tokens[:490].tolist())


def test_a_source_too_short_for_the_run_is_refused_with_the_missing_tokens(
    corpus: tuple[PreparedData, list[dict[str, Any]]],
) -> None:
    prepared, sources = corpus
    rows = [(record.tokens - 1) // 16 for record in prepared.manifest.splits["train"].sources]
    named = [{**source, "weight": 1, "max_epochs": 2} for source in sources]
    data = training_data(prepared, 16, 0, sources=named)
    enough = 2 * 3 * min(rows)
    data.refuse_too_short(enough)
    with pytest.raises(DataError) as refusal:
        data.refuse_too_short(enough + 30)
    missing = 10 * 16
    assert f"{missing:,} too few" in str(refusal.value) and "source code" in str(refusal.value)
    assert data.epochs(enough)["code"] == pytest.approx(2.0)


def test_a_source_shorter_than_a_sample_is_refused_if_it_has_a_weight(
    corpus: tuple[PreparedData, list[dict[str, Any]]],
) -> None:
    prepared, sources = corpus
    code = prepared.manifest.splits["train"].sources[1].tokens
    named = [{**source, "weight": weight} for source, weight in zip(sources, (1, 1, 1), strict=True)]
    with pytest.raises(DataError, match=f"{code} training tokens of source code are too few"):
        training_data(prepared, code, 0, sources=named)
    without = [{**source, "weight": weight} for source, weight in zip(sources, (1, 0, 1), strict=True)]
    assert training_data(prepared, code, 0, sources=without).samples_per_epoch > 0


def test_a_phase_too_short_for_a_sample_is_refused(corpus: tuple[PreparedData, list[dict[str, Any]]]) -> None:
    prepared, sources = corpus
    phases = [{"until_tokens": 9, "weights": {"web": 1}}, {"weights": {"books": 1}}]
    with pytest.raises(DataError, match=r"data\.phases\.0\.until_tokens = 9: the phase begins at sample 0"):
        training_data(prepared, 10, 0, sources=sources, phases=phases)


def test_a_later_phase_too_short_for_a_sample_is_refused_too(corpus: tuple[PreparedData, list[dict[str, Any]]]) -> None:
    """The phase ends at a later token than the one before, but within the same sample."""
    prepared, sources = corpus
    phases = [{"until_tokens": end, "weights": {"web": 1}} for end in (3000, 3009)] + [{"weights": {"books": 1}}]
    with pytest.raises(DataError, match=r"data\.phases\.1\.until_tokens = 3,009: the phase begins at sample 300"):
        training_data(prepared, 10, 0, sources=sources, phases=phases)


def test_a_far_position_in_the_data_is_found_by_formula(tmp_path: Path) -> None:
    """Sample 10^9 is found without visiting the samples before it (its cost: benchmarks/data_loading.py)."""
    file = write_jsonl(tmp_path / "a.jsonl", documents(30, 200))
    section = {"tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0}, "path": str(file)}
    prepared = prepare(DataConfig.model_validate(section), tmp_path / "out", workers=1)
    data = training_data(prepared, 8, 0)
    n = data.samples_per_epoch
    far = data.sample_ids(10**9 + np.arange(n))
    assert np.array_equal(far, np.concatenate([data.sample_ids(np.arange(10**9, 10**9 + n))]))
    assert len(np.unique(data.sample_ids(10**9 // n * n + np.arange(n)))) == n
