"""The runs of a ladder: smaller models of the same form, spread over sizes and tokens, within the budget."""

import itertools
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config import PRESETS, ModelConfig, Recipe, RecipeError, load_recipe, model_section
from hlat.config.sections.model import FULL_ATTENTION as FULL
from hlat.config.sections.model import SLIDING_ATTENTION as SLIDING
from hlat.forecast import conditions_of
from hlat.forecast.conditions import differences
from hlat.ladder import LadderPlan, LadderQuestion, design_lines, plan_ladder
from hlat.ladder.cost import Speed, Speeds, measure
from hlat.ladder.design import LEAST_STEPS, Axes, candidates, draw, target_recipe
from hlat.ladder.planned_runs import PlannedRun, Target, before_decay
from hlat.ladder.record import read_plan, write_plan
from hlat.ladder.shapes import smaller_shapes
from hlat.model import count_parameters
from hlat.optim import rate_at
from hlat.runtime.errors import PlanError

RECIPE = """
run: {name: target}
model: {vocab_size: 320, layers: 8, hidden_size: 96, intermediate_size: 256, heads: 12, kv_heads: 4}
data: {path: texts, sequence_length: 32, tokenizer: {vocab_size: 320}}
batch: {global_batch: 8}
optimizer: {lr: 2.0e-3}
schedule: {kind: wsd, warmup_steps: 400}
training: {tokens: 10M, seed: 3}
"""


def target(tmp_path: Path, *words: str) -> Target:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return target_recipe(str(file), words)


def flops(run: PlannedRun) -> float:
    return run.own_tokens * run.flops


@pytest.mark.parametrize("preset", ["llama-2-7b", "qwen3-0.6b", "llama-3.1-70b", "smollm2-135m"])
def test_smaller_models_have_the_form_of_the_target(preset: str):
    """Witness: the parameters of LLaMA's blocks by hand."""
    model = model_section(preset)
    found = smaller_shapes(model)
    assert len(found) >= 10
    for shape in found:
        small = shape.of(model)
        assert ModelConfig.model_validate(small.model_dump()) == small
        assert small.heads % small.n_kv_heads == 0 and small.n_head_dim == model.n_head_dim
        assert small.hidden_size * model.heads == model.hidden_size * small.heads
        assert small.intermediate_size / small.hidden_size == pytest.approx(
            model.intermediate_size / model.hidden_size, abs=4 / small.hidden_size
        ), "rounded to a multiple of 8"
        inner, kv = small.heads * small.n_head_dim, small.n_kv_heads * small.n_head_dim
        matrices = small.hidden_size * (2 * inner + 2 * kv + 3 * small.intermediate_size)
        norms = 2 * small.hidden_size + (2 * small.n_head_dim if small.qk_norm else 0)
        assert shape.block_parameters == small.layers * (matrices + norms) + small.hidden_size
        assert shape.parameters < count_parameters(model).total
    assert [one.block_parameters for one in found] == sorted(one.block_parameters for one in found)


OLMO = ("model.architecture=olmo3", "model.sliding_window=8", f"model.layer_types={4 * [SLIDING, FULL]}")


@pytest.mark.parametrize(
    ("words", "forks"),
    [
        (("schedule.kind=wsd", *OLMO), True),
        (("schedule.kind=cosine",), False),
    ],
)
def test_every_run_is_a_recipe_and_together_they_spread(tmp_path: Path, words: tuple[str, ...], forks: bool):
    """Also where small models have fewer layers than a pattern."""
    goal = target(tmp_path, *words)
    runs = next(candidates(goal, Axes()))
    by_name = {run.name: run for run in runs}
    assert len(by_name) == len(runs) == 20 + 4, "the cheapest with other seeds"
    whole = count_parameters(goal.recipe.model).total
    for run in runs:
        more = run.overrides if run.parent is None else [*trunk_of(run, by_name).overrides, *run.overrides]
        recipe = load_recipe(goal.source, [*goal.words, *more])
        assert set(recipe.model.layer_types or ()) == set(goal.recipe.model.layer_types or ()), "every kind of layer"
        assert recipe.total_steps == run.steps >= LEAST_STEPS and recipe.total_tokens == run.tokens
        assert count_parameters(recipe.model).total == run.parameters < whole
        assert (
            recipe.training.seed == (run.seed or 3) and recipe.batch.global_batch == 8 and recipe.optimizer.lr == 2e-3
        )
        assert recipe.evaluation.sequences == goal.recipe.evaluation.sequences, "the same ones"
        assert 20 <= math.ceil(run.steps / recipe.evaluation.every_steps) <= 40
    cheapest, *again = [runs[0], *runs[4:8]]
    assert cheapest.own_flops == min(run.own_flops for run in runs)
    assert [run.seed for run in again] == [4, 5, 6, 7] and {run.steps for run in again} == {cheapest.steps}
    per_parameter = [run.tokens / run.parameters for run in runs]
    assert min(per_parameter) < 6 and max(per_parameter) > 39
    assert max(run.parameters for run in runs) > 4 * min(run.parameters for run in runs)
    # Neither direction can be told from the other: log N and log D would lie on a line.
    sizes = {run.parameters for run in runs}
    assert all(max(r.tokens for r in runs if r.parameters == n) > 4 * min(r.tokens for r in runs if r.parameters == n)
               for n in sizes)  # fmt: skip
    assert any(run.parent for run in runs) == forks


@pytest.mark.parametrize("tokens", ["1M", "3M", "100M"])
def test_tokens_per_parameter_of_the_target_are_among_those_of_its_ladder(tmp_path: Path, tokens: str):
    goal = target(tmp_path, f"training.tokens={tokens}", "batch.global_batch=2")
    per_parameter = sorted(run.tokens / run.parameters for run in next(candidates(goal, Axes())))
    own = goal.recipe.total_tokens / count_parameters(goal.recipe.model).total
    # Tokens are whole steps: one of 100 more at most.
    assert per_parameter[0] <= 1.01 * own and per_parameter[-1] >= own
    assert per_parameter[-1] > 7.9 * per_parameter[0]


def trunk_of(run: PlannedRun, by_name: dict[str, PlannedRun]) -> PlannedRun:
    while run.parent is not None:
        run = by_name[run.parent]
    return run


@given(decay=st.floats(0.01, 0.9), warmup=st.integers(0, 3000))
@settings(max_examples=15)
def test_a_fork_goes_on_where_its_trunk_had_the_rates_of_a_run_of_its_own(tmp_path_factory, decay: float, warmup: int):
    """Every step that two runs of a size share has the same rate in both: the law of wsd."""
    folder = tmp_path_factory.mktemp("trunk")
    goal = target(folder, f"schedule.decay_fraction={decay}", f"schedule.warmup_steps={warmup}")
    runs = [
        run for run in next(candidates(goal, Axes(sizes=("w16",)))) if run.name.startswith("16x") and run.seed is None
    ]
    first = runs[0].overrides
    recipes = [load_recipe(goal.source, [*goal.words, *first, *run.overrides]) for run in runs]
    for before, after, run in zip(recipes, recipes[1:], runs[1:], strict=False):
        assert run.first == before_decay(before, before.total_steps) > before.schedule.warmup_steps
        shared = range(1, run.first + 1)
        assert [rate_at(before, step) for step in shared] == [rate_at(after, step) for step in shared]
        assert before.checkpoint.keep_every_steps == run.first, "and that step is kept"
        assert run.first % (before.checkpoint.every_steps or 0) == 0
    assert runs[1].own_tokens == pytest.approx(runs[1].tokens - runs[1].first * goal.recipe.tokens_per_step)


@given(budget=st.floats(9, 15))
def test_a_design_is_within_its_budget(tmp_path_factory, budget: float):
    """Whatever the budget: the cost is below it, or the error names one that would do."""
    folder = tmp_path_factory.mktemp("budget")
    goal = target(folder)

    def drawn(amount: float) -> list[PlannedRun]:
        return draw(candidates(goal, Axes()), flops, amount, "--flops", "{:.6e}".format)

    try:
        runs = drawn(10**budget)
    except PlanError as error:
        assert "is too little" in str(error)
        enough = float(str(error).split("law. ")[1].split()[0])
        assert enough > 10**budget and drawn(enough)
        return
    assert sum(map(flops, runs)) <= 10**budget and len(runs) >= 5
    assert len({run.parameters for run in runs}) >= 3 and len({run.tokens for run in runs}) >= 5


def test_seconds_are_those_of_measured_sizes_and_grow_as_flops_beyond():
    speeds = Speeds((Speed(1e3, 1.5, 1e-3, 1e-4, outside=0.5), Speed(3e3, 3.0, 2e-3, 3e-4, outside=1.0)))
    run = PlannedRun("a", 1, 1000, 10, 1e3, (), validated_tokens=200)
    assert speeds.seconds(run) == pytest.approx(2 + 1000 * 1e-3 + 2 * 100 * 1e-4)
    assert speeds.seconds(replace(run, flops=2e3)) == pytest.approx(3 + 1000 * 1.5e-3 + 2 * 100 * 2e-4)
    assert speeds.seconds(replace(run, flops=6e3)) == pytest.approx(4 + 1000 * 4e-3 + 2 * 100 * 6e-4)
    assert [speeds.at(each).outside for each in (5e2, 2e3, 6e3)] == [0.5, 0.75, 1.0]
    assert speeds.seconds(replace(run, flops=5e2)) == pytest.approx(speeds.seconds(run))
    assert speeds.seconds(replace(run, first=5, parent="b")) == pytest.approx(2 + 500 * 1e-3 + 2 * 100 * 1e-4)


def test_sizes_are_measured_until_the_largest_of_the_design_has_been(tmp_path: Path):
    """A machine whose time does not grow as FLOPs: the first design is too careful, the last one fits."""
    goal = target(tmp_path)
    probed = list[str]()

    def probe(run: PlannedRun) -> Speed:
        probed.append(run.name)
        return Speed(run.flops, 1.0, 1e-6 + run.flops * 1e-13, 1e-7)

    def choose(cost) -> list[PlannedRun]:
        return draw(candidates(goal, Axes()), cost, 60.0, "--budget", str)

    cheapest = min(candidates(goal, Axes()), key=lambda runs: sum(map(flops, runs)))
    speeds = measure(choose, probe, cheapest)
    runs = choose(speeds.seconds)
    assert speeds.covers(max(run.flops for run in runs)) and 2 <= len(probed) <= 5
    truth = sum(1.0 + run.own_tokens * (1e-6 + run.flops * 1e-13) + run.validated_tokens * 1e-7 for run in runs)
    assert truth == pytest.approx(sum(map(speeds.seconds, runs)), rel=0.1)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["batch.ramp=[{tokens: 1024, global_batch: 4}]", "data.validation.fraction=0"], ["batch.ramp=[]", "0.01"]),
        (["model.heads=1", "model.kv_heads=1", "model.layers=2"], ["too small", "3 sizes"]),
        (["checkpoint.init_from=runs/x"], ["begin at random"]),
        (["schedule={kind: wsd, decay_fraction: 1}"], ["no step before its decay", "linear"]),
        (["training.steps=null", "training.tokens=null", "stages=[{name: a, steps: 5000}]"], ["stages: do not scale"]),
    ],
)
def test_a_recipe_without_a_ladder_is_refused_with_every_reason(tmp_path: Path, words: list[str], parts: list[str]):
    with pytest.raises(RecipeError) as caught:
        target(tmp_path, *words)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["--budget 2h"]),
        ({"budget": "soon", "flops": "many"}, ["soon", "many", "both limit"]),
        ({"sizes": "big,1M", "tokens": "5,none"}, ["--sizes: big", "--tokens: none"]),
        ({"sizes": "w17", "tokens": "5,10"}, ["w17", "16, 24"]),
        ({"flops": "10"}, ["--flops: 10 FLOPs is too little", "would do"]),
        ({"sizes": "w8", "tokens": "0.1,0.2"}, ["batch.global_batch", "steps"]),
        ({"tokens": "20"}, ["sizes at one token count", "Give two"]),
        ({"sizes": "w8,w16", "tokens": "5,20"}, ["it has 4 finished runs", "2 sizes"]),
        ({"sizes": "1B,w8,w16", "tokens": "5,20"}, ["1B", "The nearest: "]),
    ],
)
def test_wrong_options_are_said_with_what_would_work(tmp_path: Path, options: dict[str, str], parts: list[str]):
    source = target(tmp_path).source
    with pytest.raises(PlanError) as caught:
        plan_ladder(LadderQuestion(source, to=str(tmp_path / "ladder"), **options))
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert not (tmp_path / "ladder").exists()


def test_a_batch_that_gives_too_few_steps_is_refused_with_one_that_does_not(tmp_path: Path):
    with pytest.raises(PlanError, match=r"batch\.global_batch = 4096.*at most batch\.global_batch=(\d+)") as caught:
        next(candidates(target(tmp_path, "batch.global_batch=4096", "schedule.warmup_steps=2"), Axes()))
    advised = str(caught.value).partition("at most ")[2].partition(",")[0]
    assert next(candidates(target(tmp_path, advised, "schedule.warmup_steps=2"), Axes()))


def test_a_design_is_read_again_and_another_recipe_is_refused(tmp_path: Path, corpus: Path):
    text = f"data.path={corpus}"
    goal = target(tmp_path, text)
    question = LadderQuestion(goal.source, (text,), flops="1e13", tokens="5, 20", to=str(tmp_path / "ladder"))
    with pytest.raises(PlanError, match=f"no ladder in {tmp_path / 'ladder'}"):
        plan_ladder(question, found_only=True)
    assert not (tmp_path / "ladder").exists()
    plan = plan_ladder(question)
    assert (tmp_path / "ladder" / "data").is_dir(), "before any run, as a job array needs it"
    assert all(run.validated_tokens for run in plan.runs) and sum(run.own_flops for run in plan.runs) <= 1e13
    assert plan_ladder(replace(question, tokens="5,20")) == plan
    assert read_plan(goal, plan.folder, {"flops": None, "sizes": None}) == plan, "options may be left out"
    free = ("run.name=other", "tracking.tensorboard=false", "run.ladder=runs/x", "anomalies.forecast=stop")
    free = (*free, "training.tokens=20M", "checkpoint.every_steps=7", "evaluation.every_steps=9")
    other = target(tmp_path, f"data.path={os.path.relpath(corpus)}", *free)
    found = read_plan(other, plan.folder, {})
    assert found is not None and found.runs == plan.runs and found.target.recipe.total_tokens > 19e6
    assert found.recipe_of(found.runs[0]).run.ladder is None
    with pytest.raises(PlanError, match=r"other settings.*--flops is 1e14, and was 1e13.*--to NEW"):
        plan_ladder(replace(question, flops="1e14"))
    with pytest.raises(PlanError, match=r"optimizer\.lr is 0\.01, and was 0\.002"):
        plan_ladder(replace(question, words=(text, "optimizer.lr=1e-2")))
    for word in ("data.tokenizer.eos_token=null", "data.validation.by=tail", "schedule.horizon_steps=9000"):
        name = word.partition("=")[0].replace("steps", "share")
        with pytest.raises(PlanError, match=rf"{name} is .*, and was (auto|1\.0)"):
            plan_ladder(replace(question, words=(text, word)))
    shutil.rmtree(plan.folder / "data")
    plan_ladder(question)
    assert (plan.folder / "data").is_dir(), "again before any run"
    (plan.folder / "design.json").write_text("{")
    with pytest.raises(PlanError, match=r"design\.json: cannot be read"):
        plan_ladder(question)


def test_a_horizon_is_a_share_of_the_length(tmp_path: Path):
    """In designs of versions that recorded steps, too: those of another length would have been another schedule."""
    goal = target(tmp_path, "schedule.horizon_steps=30000")
    plan = LadderPlan(goal, tmp_path / "ladder", tuple(next(candidates(goal, Axes()))), conditions_of(goal.recipe))
    longer = target(tmp_path, "schedule.horizon_steps=60000", "training.tokens=20M")
    other = target(tmp_path, "schedule.horizon_steps=30000", "training.tokens=20M")
    write_plan(plan, {})
    for _ in range(2):
        assert read_plan(goal, plan.folder, {}) == plan
        assert read_plan(longer, plan.folder, {}).runs == plan.runs
        with pytest.raises(PlanError, match=r"schedule\.horizon_share is 0\.38, and was 0\.77"):
            read_plan(other, plan.folder, {})
        content = json.loads((plan.folder / "design.json").read_text())
        content["recipe"] = {**content["recipe"], "schedule.horizon_steps": 30000}
        content["recipe"].pop("schedule.horizon_share", None)
        (plan.folder / "design.json").write_text(json.dumps(content))


def test_an_open_rate_is_one_for_each_size(tmp_path: Path):
    content = yaml.safe_load(RECIPE)
    del content["optimizer"]
    content["model"] |= {"hidden_size": 3072, "layers": 24, "intermediate_size": 8192}
    (tmp_path / "open.yaml").write_text(yaml.safe_dump(content))
    goal = target_recipe(str(tmp_path / "open.yaml"), ())
    runs = next(candidates(goal, Axes()))
    rates = [load_recipe(goal.source, run.overrides).optimizer.lr for run in runs if run.parent is None]
    assert len(set(rates)) > 1 and all(0 < rate <= 3e-3 for rate in rates)
    scaled = target_recipe(str(tmp_path / "open.yaml"), ("optimizer={transfer: mup, base_hidden_size: 256}",))
    own = {load_recipe(scaled.source, [*scaled.words, *run.overrides]).optimizer.lr
           for run in next(candidates(scaled, Axes())) if run.parent is None}  # fmt: skip
    assert own == {scaled.recipe.optimizer.lr}, "the rule scales it"
    # A run of another length chooses another rate, as the sizes of the ladder did. Scaled ones all have the target's.
    longer = ("training.tokens=2B",)
    assert "optimizer.lr" not in [one.field for one in differences(goal.conditions, target_of(goal, longer))]
    assert "optimizer.lr" in [one.field for one in differences(scaled.conditions, target_of(scaled, longer))]


def target_of(ladder: Target, words: tuple[str, ...]) -> Recipe:
    """The recipe of a ladder with other words, as its run has it."""
    return target_recipe(ladder.source, (*ladder.words, *words)).recipe


def test_the_warm_up_of_a_short_run_does_not_vanish(tmp_path: Path):
    """Witness: the share by hand; a target without one has runs without one."""
    for warmup, least in ((1, 0.02), (4000, 4000 * 8 * 32 / 10e6), (0, 0.0)):
        goal = target(tmp_path, "schedule.kind=cosine", f"schedule.warmup_steps={warmup}")
        for run in next(candidates(goal, Axes())):
            recipe = load_recipe(goal.source, run.overrides)
            assert recipe.schedule.warmup_steps == pytest.approx(least * run.steps, abs=1.01), (warmup, run)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.slow
def test_every_preset_has_a_ladder(tmp_path: Path, preset: str):
    words = [f"{{preset: {preset}}}", "{path: texts}", "{global_batch: 4}", "{tokens: 10B}"]
    sections = dict(zip(("model", "data", "batch", "training"), words, strict=True))
    (tmp_path / "preset.yaml").write_text("\n".join(f"{name}: {text}" for name, text in sections.items()))
    goal = target_recipe(str(tmp_path / "preset.yaml"), ())
    runs = next(candidates(goal, Axes()))
    for run in itertools.islice(runs, 0, None, 4):
        assert load_recipe(goal.source, run.overrides).total_steps == run.steps
    lines = design_lines(LadderPlan(goal, tmp_path, tuple(runs), {}))
    assert max(map(len, lines)) <= 80


def test_a_design_is_written_once(tmp_path: Path):
    goal = target(tmp_path)
    plan = LadderPlan(goal, tmp_path / "ladder", tuple(next(candidates(goal, Axes()))), {})
    write_plan(plan, {"flops": "1e15"})
    assert read_plan(goal, plan.folder, {}) == plan
    assert [run for runs in plan.by_size() for run in runs] == list(plan.runs) and len(plan.by_size()) == 5
