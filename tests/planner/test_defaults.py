"""Values that a recipe leaves open: chosen by size and device, never against what is given, and kept by its run."""

import json
from typing import Any

import pytest
import yaml

from hlat.api.recipes import recipe_job
from hlat.config import Recipe, RecipeError
from hlat.config.load import parse_recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.launch import TrainingJob
from hlat.planner import load_run_recipe, recipe_fit, resolve_defaults
from hlat.planner.defaults import CHOSEN, peak_rate
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request
from hlat.planner.search import best_layout, predict_layout
from hlat.runtime.storage.run_folder import RECIPE_HEAD

OPEN: dict[str, Any] = {
    "run": {"dir": "no-such-folder", "device": "cpu"},
    "model": {"preset": "tiny-1m"},
    "data": {"path": "none"},
    "training": {"tokens": "10M"},
}
GIVEN = (
    "batch.global_batch=24 batch.micro_batch=3 memory.activation_checkpointing=selective parallel.zero=2 "
    "schedule.warmup_steps=7 optimizer.lr=0.00123 checkpoint.every_steps=77"
)


def recipe(overrides: str = "", world: int | None = 1, **sections: Any) -> Recipe:
    return parse_recipe({**OPEN, **sections}, overrides=overrides.split(), world=world)


def values(of: Recipe) -> dict[str, Any]:
    return {path: getattr(getattr(of, path.split(".")[0]), path.split(".")[1]) for path in CHOSEN}


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ("batch.global_batch=4", None),
        ("batch.global_batch=512", 256),
        ("batch.micro_batch=12", 4),
        ("batch.micro_batch=64", None),
        ("", 48),
        ("", 3),
        ("parallel.pipeline=4 batch.global_batch=4", 4),
        ("parallel.pipeline=4 batch.global_batch=2", 4),
        ("parallel.tensor=4 data.sequence_length=62", 4),
        ("model.max_sequence_length=512", None),
        ("memory.budget_gib=2", None),
        ('schedule.kind=wsd schedule.warmup_steps=9 training={"steps":10}', None),
        ('schedule.kind=wsd training={"steps":3}', None),
        ('schedule.horizon_steps=1 training={"steps":3000}', None),
        ('training={"steps":1}', None),
        ('batch.global_batch=48 batch.ramp=[{"tokens":1000,"global_batch":24}]', 24),
    ],
)
def test_a_default_never_refuses_a_recipe(overrides, world) -> None:
    """Nor does a chosen value: with all of them written out it is still a recipe."""
    loaded = recipe(overrides, world)
    for cluster in (None, parse_cluster("h100-pcie:1", load_catalog())):
        chosen, _ = resolve_defaults(loaded, world, cluster)
        parse_recipe(chosen.model_dump(mode="json"), world=world)


def test_what_is_given_still_is_refused_where_it_is_wrong() -> None:
    with pytest.raises(RecipeError, match="global_batch 4 is not a multiple"):
        recipe("batch.global_batch=4 batch.micro_batch=8")


def test_a_recipe_that_gives_everything_is_left_as_it_is() -> None:
    loaded = recipe(GIVEN)
    chosen, choices = resolve_defaults(loaded, 1, parse_cluster("h100-pcie:1", load_catalog()))
    assert chosen == loaded and choices == []
    for path in CHOSEN:  # and each field alone
        [word] = [word for word in GIVEN.split() if word.startswith(path)]
        if path != "parallel.zero":
            assert values(resolve_defaults(recipe(f"batch.global_batch=24 {word}"), 1)[0])[path] == values(loaded)[path]


@pytest.mark.parametrize(
    ("model", "cluster", "length"),
    [("llama-3-8b", "p5.48xlarge:4", 8192), ("llama-3-70b", "p5.48xlarge:32", 4096), ("qwen2.5-7b", "h100:1", 4096)],
)
def test_the_layout_is_the_fastest_that_fits(model, cluster, length) -> None:
    """The witness is the planner's own search, with degrees of tensor, pipeline and context that it may choose."""
    on = parse_cluster(cluster, load_catalog())
    sections = {"model": {"preset": model}, "data": {"path": "none", "sequence_length": length}}
    loaded = recipe("training.tokens=200B", on.devices, **sections)
    chosen, choices = resolve_defaults(loaded, on.devices, on)
    fit = recipe_fit(chosen, on)
    assert fit.fits and fit.needed < 0.9 * fit.memory and "the fastest that fits" in str(choices[1])
    static = "batch.global_batch=2048 batch.micro_batch=8 memory.activation_checkpointing=none parallel.zero=1"
    assert not recipe_fit(recipe(static, on.devices, **sections), on).fits, "what was the default"
    question = PlanQuestion(model=model, sequence=length, global_batch=chosen.batch.global_batch)
    request = resolve_request(question, on)
    best = best_layout(request)
    assert best is not None
    candidate = best.candidate.__class__(
        chosen.parallel, on.devices, chosen.batch.micro_batch, chosen.memory.activation_checkpointing
    )
    assert predict_layout(request, candidate).step_seconds < 1.4 * best.step_seconds


def test_rate_batch_and_warm_up_follow_the_compute() -> None:
    """Between what LLaMA 2 or 3 and DeepSeek LLM took, whose steps had 4M to 16M, and 9.4M or 18.9M tokens."""
    for model, tokens, least, most in (
        ("llama-2-7b", "2T", 3e-4, 4.2e-4),
        ("llama-3-8b", "15T", 3e-4, 4.2e-4),
        ("llama-2-70b", "2T", 1.5e-4, 3.2e-4),
        ("llama-3-70b", "15T", 1.5e-4, 3.2e-4),
    ):
        sections = {"model": {"preset": model}, "data": {"path": "none", "sequence_length": 4096}}
        chosen, _ = resolve_defaults(recipe(f"training.tokens={tokens}", None, **sections), here=False)
        assert least <= 1.1 * chosen.optimizer.lr and chosen.optimizer.lr <= 1.1 * most, (model, chosen.optimizer.lr)
        assert 4e6 < chosen.tokens_per_step < 4e7 and chosen.schedule.warmup_steps == 2000
    # LLaMA 3 took 8e-5 for 405B on 15.6T. Step Law gives 1.1e-4 there, the law by compute alone 2.0e-4.
    assert 8e-5 <= peak_rate(6 * 405e9 * 15.6e12, 15.6e12, trained=False) <= 1.1e-4
    small, _ = resolve_defaults(recipe(), here=False)
    assert small.optimizer.lr == 3e-3 and 0 < small.schedule.warmup_steps < 0.03 * small.total_steps
    again, _ = resolve_defaults(recipe("checkpoint.init_from=x"), here=False)
    assert again.optimizer.lr == pytest.approx(3e-4)


def test_a_run_keeps_what_it_began_with(tmp_path) -> None:
    """Also if its length, by which values are chosen, or its device is another."""
    file, run = tmp_path / "open.yaml", tmp_path / "run"
    file.write_text(json.dumps({**OPEN, "run": {"dir": str(run), "device": "cpu"}}))
    first = TrainingJob(str(file)).load(1)
    longer = ("training.tokens=100M",)
    assert values(TrainingJob(str(file), longer).load(1)) != values(first)
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"{RECIPE_HEAD}\n{yaml.safe_dump(first.model_dump(mode='json'))}")
    assert values(TrainingJob(str(file), longer).load(1)) == values(first)
    assert TrainingJob(str(file), ("optimizer.lr=1e-4",)).load(1).optimizer.lr == 1e-4, "what is given wins"
    # On other numbers of processes the batch stays, and what a device takes of it may change.
    assert load_run_recipe(str(file), world=8).batch.global_batch == first.batch.global_batch
    with pytest.raises(RecipeError, match="3 data-parallel ranks"):
        load_run_recipe(str(file), world=3)


def test_a_recipe_in_memory_leaves_open_what_it_does_not_give() -> None:
    with recipe_job(recipe("batch.global_batch=16"), ()) as job:
        loaded = job.load_as_written(1)
        assert loaded.gives("batch.global_batch") and not loaded.gives("optimizer.lr")


def test_a_plan_searches_what_a_recipe_leaves_open(tmp_path) -> None:
    file = tmp_path / "open.yaml"
    for word, searched in (("", True), ("batch: {micro_batch: 2}\nmemory: {activation_checkpointing: full}\n", False)):
        file.write_text(word + yaml.safe_dump(OPEN))
        request = resolve_request(PlanQuestion(model=str(file)), parse_cluster("h100:1", load_catalog()))
        assert (request.micro_batch is None) is searched and (len(request.recompute) > 1) is searched
