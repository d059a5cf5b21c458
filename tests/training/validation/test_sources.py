"""Loss per source: each token counts for the source it is of, and the total is their mean weighted by tokens."""

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hlat.config.load import parse_recipe
from hlat.config.sections.data import DataConfig
from hlat.config.sections.model import ModelConfig
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.training_data import ValidationData
from hlat.model import build
from hlat.training.validation.losses import SingleProcessModel, validate

LENGTH = 16
MODEL = ModelConfig(vocab_size=64, layers=1, hidden_size=16, intermediate_size=32, heads=2)
TEXTS = {"letters": "abcdefgh ", "digits": "0123456789 ", "marks": "+-*/.,;:!? "}


def prepared_of(folder: Path, names: list[str]) -> PreparedData:
    for name in names:
        (folder / f"{name}.txt").write_text(TEXTS[name] * 40)
    section = {
        "sources": [{"path": str(folder / f"{name}.txt"), "name": name} for name in names],
        "sequence_length": LENGTH,
        "tokenizer": {"train": "char"},
        "validation": {"fraction": 0.37, "by": "tail"},
    }
    return prepare(DataConfig.model_validate(section), folder / "data", workers=1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared_of(tmp_path_factory.mktemp("mixed"), list(TEXTS))


@pytest.fixture(scope="module")
def model() -> SingleProcessModel:
    return SingleProcessModel(build(MODEL, device="cpu", seed=5).requires_grad_(False))


def token_losses(model: SingleProcessModel, data: ValidationData) -> list[list[tuple[int, float]]]:
    """Return for each window (token's place in the split, its loss), from logits and torch's cross-entropy."""
    found = []
    for window in range(len(data)):
        batch = data.batch(window, 1)
        logits_SV = model._model(batch.inputs_BS)[0]
        losses_S = F.cross_entropy(logits_SV.double(), batch.labels_BS[0], reduction="none", ignore_index=-100)
        first = int(batch.sample_ids[0]) * LENGTH + 1
        kept = [
            (first + place, float(loss)) for place, loss in enumerate(losses_S) if batch.labels_BS[0, place] != -100
        ]
        found.append(kept)
    return found


@pytest.mark.parametrize("sequences", [None, 5])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_source_has_the_mean_of_its_own_tokens(mixed, model, sequences, batch_size):
    """float32 losses of 16 tokens, each about 4: their sums differ from float64's by 16 x 2^-24 relative at most."""
    data = ValidationData(mixed, LENGTH, sequences)
    assert data.sources == tuple(TEXTS)
    ends = [sum(each.tokens for each in mixed.manifest.splits["validation"].sources[: n + 1]) for n in range(3)]
    wanted = defaultdict(list)
    for window in token_losses(model, data):
        for token, loss in window:
            wanted[next(name for name, end in zip(TEXTS, ends, strict=True) if token < end)].append(loss)
    result = validate(model, data, batch_size)
    assert {name: part.tokens for name, part in result.sources.items()} == {n: len(each) for n, each in wanted.items()}
    for name, losses in wanted.items():
        part = result.sources[name]
        assert part.loss == pytest.approx(math.fsum(losses) / len(losses), rel=LENGTH * 2**-23)
        # one character is one byte and one token; the end of a document has none
        assert part.bits_per_byte >= part.loss / math.log(2)
    weighted = math.fsum(part.loss * part.tokens for part in result.sources.values()) / result.tokens
    assert result.loss == pytest.approx(weighted, rel=1e-14)
    every = [loss for losses in wanted.values() for loss in losses]
    assert result.tokens == len(every)
    assert result.loss == pytest.approx(math.fsum(every) / len(every), rel=LENGTH * 2**-23)


def test_one_source_is_the_same_number_as_before_and_has_no_parts(model, tmp_path):
    data = ValidationData(prepared_of(tmp_path, ["letters"]), LENGTH)
    result = validate(model, data, 3)
    losses = [loss for window in token_losses(model, data) for _, loss in window]
    assert not result.sources and result.tokens == len(losses)
    assert result.loss == pytest.approx(math.fsum(losses) / len(losses), rel=3 * LENGTH * 2**-23)


class Rank:
    """One of several data-parallel ranks, which keeps its terms instead of summing them over all."""

    row_multiple, is_model_parallel_leader, isolates = 1, True, False

    def __init__(self, model: SingleProcessModel, ranks: int, index: int) -> None:
        self.data_ranks, self.data_index, self.terms = ranks, index, torch.zeros(0)
        self.evaluate, self.evaluate_rows, self.batches = model.evaluate, model.evaluate_rows, 0

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        self.terms = values
        return values + 1  # of the others: only the terms are looked at


def test_the_terms_of_data_parallel_ranks_add_up(mixed, model):
    data = ValidationData(mixed, LENGTH)
    alone, ranks = Rank(model, 1, 0), [Rank(model, 3, index) for index in range(3)]
    for rank in (alone, *ranks):
        validate(rank, data, 2)
    torch.testing.assert_close(sum(rank.terms for rank in ranks), alone.terms, rtol=1e-14, atol=0)


def test_progress_counts_up_to_all_micro_batches(mixed, model):
    data, seen = ValidationData(mixed, LENGTH), []
    validate(model, data, 2, lambda done, total: seen.append((done, total)))
    total = -(-len(data.parts()) // 2)
    assert seen == [(done, total) for done in range(total + 1)]


def test_a_run_logs_and_evaluate_prints_each_source_and_each_set(cli, tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text * 40)
    sources = [{"path": str(tmp_path / f"{name}.txt"), "name": name, "weight": 1.0} for name in TEXTS]
    recipe = parse_recipe(
        {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "model": MODEL.model_dump(exclude_none=True),
            "data": {
                "sources": sources,
                "sequence_length": LENGTH,
                "tokenizer": {"train": "char"},
                "validation": {"fraction": 0.37, "by": "tail"},
            },
            "batch": {"global_batch": 2, "micro_batch": 2},
            "training": {"steps": 2, "log_every": 1},
            "precision": {"mode": "fp32"},
            "evaluation": {"every_steps": 2, "sequences": None, "sets": {"extra": str(tmp_path / "digits.txt")}},
        }
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json")))
    assert cli("train", file).returncode == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    done = cli("evaluate", tmp_path / "run", "--json")
    found = json.loads(done.stdout)
    assert list(found["sources"]) == list(TEXTS) and list(found["sets"]) == ["extra"]
    for name, part in found["sources"].items():  # the same weights and windows, in the same precision
        assert part["loss"] == last[f"val/sources/{name}/loss"]
    assert found["loss"] == last["val_loss"] and found["sets"]["extra"]["loss"] == last["val/extra/loss"]
    said = cli("evaluate", tmp_path / "run").stdout
    assert f"source digits: loss {found['sources']['digits']['loss']:.4f}" in said and "set extra: loss" in said
    assert "sources" in cli("show", tmp_path / "run").stdout
    assert cli("report", tmp_path / "run").returncode == 0
    assert "sources/digits" in (tmp_path / "run" / "report.html").read_text()
