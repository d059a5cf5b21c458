"""Fields of a recipe that make its losses incomparable with a ladder's, and those that only change the law."""

from typing import Any

import pytest

import hlat
from hlat.config import Recipe
from hlat.forecast import Ladder, conditions_of
from hlat.forecast.conditions import differences
from hlat.runtime.errors import PlanError
from tests.forecast.ladders import ladder_of, observations


def recipe(**changes: Any) -> Recipe:
    values = {
        "model.preset": None, "model.vocab_size": 32000, "model.layers": 4, "model.hidden_size": 256, "model.heads": 4,
        "model.intermediate_size": 512, "data.path": "/one/corpus.parquet", "data.tokenizer.path": "/one/llama.json",
        "training.steps": 1000, "schedule.warmup_steps": 20, "precision.mode": "fp32",
    }  # fmt: skip
    content: dict[str, Any] = {}
    for path, value in {**values, **changes}.items():
        *sections, name = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return hlat.load_recipe(content)


@pytest.fixture(scope="module")
def ladder() -> Ladder:
    return Ladder(ladder_of(observations(noise=0.003)).runs, conditions_of(recipe()))


@pytest.mark.parametrize(
    "changes",
    [
        {"model.layers": 8, "model.hidden_size": 512, "model.heads": 8, "model.kv_heads": 2},
        {"training.steps": 10_000, "schedule.warmup_steps": 200},
        {"data.path": "/two/corpus.parquet", "data.tokenizer.path": "/two/llama.json"},
        {"training.seed": 7, "batch.micro_batch": 2, "parallel.zero": 2, "run.name": "other"},
        {"precision.mode": "auto"},  # that of the machine: it may be the same
    ],
)
def test_sizes_tokens_places_and_layouts_are_free(changes: dict[str, Any]) -> None:
    assert differences(conditions_of(recipe()), recipe(**changes)) == []


def test_what_a_run_is_left_to_choose_is_no_difference() -> None:
    conditions = conditions_of(recipe(**{"optimizer.lr": 1e-3}))
    assert differences(conditions, recipe()) == []
    assert [one.field for one in differences(conditions, recipe(**{"optimizer.lr": 2e-3}))] == ["optimizer.lr"]


@pytest.mark.parametrize(
    "path, value",
    [
        ("data.path", "/one/other.parquet"),
        ("data.tokenizer.path", "/one/other.json"),
        ("data.sequence_length", 512),
        ("data.packing", "best-fit"),
        ("data.isolate", True),
        ("checkpoint.init_from", "weights"),
        ("data.validation.fraction", 0.02),
        ("data.validation.by", "tail"),  # instead of auto
        ("model.vocab_size", 32064),
    ],
)
def test_losses_that_measure_something_else_are_refused(ladder: Ladder, path: str, value: Any) -> None:
    found = differences(conditions_of(recipe()), recipe(**{path: value}))
    assert any(one.incomparable for one in found)
    with pytest.raises(PlanError, match="its losses measure something else"):
        ladder.forecast_recipe(recipe(**{path: value}))


@pytest.mark.parametrize(
    "path, value, field",
    [
        ("optimizer.lr", 1e-3, "optimizer.lr"),
        ("optimizer.z_loss", 1e-4, "optimizer.z_loss"),
        ("optimizer.kind", "muon", "optimizer.kind"),
        ("schedule.warmup_steps", 100, "schedule.warmup_share"),
        ("schedule.kind", "wsd", "schedule.kind"),
        ("batch.global_batch", 64, "batch.tokens"),
        ("data.shuffle", False, "data.shuffle"),
        ("precision.mode", "bf16", "precision.mode"),
        ("model.tie_embeddings", True, "model.tie_embeddings"),
        ("model.rope.theta", 5e5, "model.rope"),
    ],
)
def test_another_law_is_a_warning(ladder: Ladder, path: str, value: Any, field: str) -> None:
    found = differences(conditions_of(recipe()), recipe(**{path: value}))
    assert [one.field for one in found] == [field] and not found[0].incomparable
    forecast = ladder.forecast_recipe(recipe(**{path: value, "training.steps": 10**5}))
    assert any(f"{field} is " in line for line in forecast.warnings)


@pytest.mark.parametrize("name", ["*.parquet", "**/part-?.parquet", "*/x.parquet", "[ab]/"])
def test_globs_are_compared_with_the_folder_that_they_name(name: str) -> None:
    conditions = conditions_of(recipe(**{"data.path": f"/one/books/{name}"}))
    assert differences(conditions, recipe(**{"data.path": f"s3://two/books/{name}"})) == []
    (found,) = differences(conditions, recipe(**{"data.path": f"/one/web/{name}"}))
    assert found.field == "data.text" and found.incomparable
    assert differences(conditions_of(recipe(**{"data.path": name})), recipe(**{"data.path": name})) == []


def test_mixtures_differ_by_their_weights() -> None:
    def mixed(weight: float) -> Recipe:
        return recipe(**{"data.path": None, "data.sources": [
            {"path": "/one/a.parquet", "weight": 1.0}, {"path": "/one/b.parquet", "weight": weight}]})  # fmt: skip

    assert differences(conditions_of(mixed(1.0)), mixed(1.0)) == []
    assert [one.field for one in differences(conditions_of(mixed(1.0)), mixed(2.0))] == ["data.text"]
