"""Laws of a layout's rules: what is impossible is refused, what a remedy names works and is the nearest that does."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.config import Problem, Recipe, RecipeError, load_recipe, recipe_schema
from hlat.config.layout_checks import CHECKS, Check, Rule, Unavailable, Values, holds
from hlat.config.layout_rules import LAYOUT_RULES
from hlat.config.load import _valid_values, parse_recipe
from hlat.config.sections.training import ParallelConfig
from hlat.config.yaml_files import apply_overrides

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
DEGREE = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 8, 16])
PARALLEL = st.fixed_dictionaries(
    {},
    optional={
        "tensor": DEGREE,
        "sequence": st.booleans(),
        "pipeline": DEGREE,
        "virtual_stages": st.sampled_from([None, 1, 2, 3]),
        "schedule": st.sampled_from(SCHEDULES),
        "split": st.lists(st.integers(1, 5), min_size=1, max_size=6),
        "context": DEGREE,
        "zero": st.sampled_from([0, 1, 2, 3]),
        "replicas": DEGREE,
    },
)
WORLD = st.none() | st.integers(1, 100) | st.sampled_from([8, 16, 32, 64])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int | None]:
    """Small recipes with any layout, most of them impossible, and a number of processes or none."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4]))
    content = {
        "model": {
            "vocab_size": draw(st.sampled_from([3, 1000])),
            "layers": draw(st.integers(1, 12)),
            "hidden_size": 2 * heads,
            "intermediate_size": draw(st.sampled_from([30, 96, 128])),
            "heads": heads,
            "kv_heads": kv_heads,
        },
        "data": {
            "path": "x",
            "sequence_length": draw(st.sampled_from([63, 64, 80, 96])),
            "tokenizer": {"train": "char"},
        },
        "batch": {
            "global_batch": draw(st.sampled_from([22, 24, 31, 32, 40, 64])),
            "micro_batch": draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
        },
        "training": {"steps": 10},
        "parallel": draw(PARALLEL),
    }
    return content, draw(WORLD)


def seen(content: dict[str, Any], world: int | None) -> Values:
    values = Values(_valid_values(Recipe, content))
    return values if world is None else values.having("world", world)


def failing(v: Values) -> int:
    return sum(not holds(check, v) for check in CHECKS)


def passes(check: Check, rule: Rule, v: Values) -> bool:
    """True if a rule applies, its check passes, and so do the checks that it depends on."""
    try:
        return not list(check(v)) and not list(rule(v))
    except Unavailable:
        return False


def broken(v: Values) -> Iterator[tuple[Check, Rule, Problem]]:
    """Problems, each with the rule that reports it and its check."""
    for check, rule in zip(CHECKS, LAYOUT_RULES, strict=True):
        try:
            problems = list(rule(v))
        except Unavailable:
            continue
        assert len(problems) <= 1
        for problem in problems:
            assert list(check(v)), "rules and checks are listed in the same order"
            yield check, rule, problem


@given(layouts())
def test_every_problem_has_a_remedy_and_a_remedy_works(layout):
    v = seen(*layout)
    for check, rule, problem in broken(v):
        assert problem.fixes, f"nothing would work: {problem}"
        for fix in problem.fixes:
            changed = v.having(fix.path, fix.value)
            assert passes(check, rule, changed), (problem, fix)
            shown = fix.value if isinstance(fix.value, str) else json.dumps(fix.value)
            assert shown in problem.remedy, "the sentence names what the program would do"


@given(layouts())
def test_who_follows_the_remedies_ends_with_a_recipe_that_works(layout):
    content, world = layout
    for _ in range(12):
        try:
            parse_recipe(content, world=world)
        except RecipeError as error:
            fix = error.problems[0].fixes[0]
            if fix.path == "world":
                world = fix.value
            else:
                content, _ = apply_overrides(content, [f"{fix.path}={json.dumps(fix.value)}"])
        else:
            return
    raise AssertionError(f"in circles: {content}, {world}")


NUMBERS = (
    "parallel.tensor",
    "parallel.context",
    "parallel.pipeline",
    "parallel.replicas",
    "batch.micro_batch",
    "batch.global_batch",
    "world",
)


@given(layouts())
def test_no_nearer_number_would_leave_less_wrong(layout):
    """Against every number up to 200, whatever the candidates of the rule were."""
    v = seen(*layout)
    for check, rule, problem in broken(v):
        if problem.path not in NUMBERS:
            continue
        (least,) = {failing(v.having(fix.path, fix.value)) for fix in problem.fixes}
        named = [fix.value for fix in problem.fixes if fix.path == problem.path]
        reach = max(abs(value - v(problem.path)) for value in named) if len(named) == 2 else 200
        for value in {*range(1, 201)} - {*named}:
            changed, distance = v.having(problem.path, value), abs(value - v(problem.path))
            left = failing(changed)
            if left < least or (left == least and distance < reach):
                assert not passes(check, rule, changed), (problem, value)


@given(layouts())
def test_a_recipe_is_refused_just_when_a_check_fails(layout):
    """Skipping rules whose input is wrong never lets the last mistake through."""
    content, world = layout
    impossible = failing(seen(content, world)) > 0
    try:
        recipe = parse_recipe(content, world=world)
    except RecipeError as error:
        assert impossible
        assert len({problem.path for problem in error.problems}) == len(error.problems), f"said twice: {error}"
    else:
        assert not impossible
        assert recipe.parallel.stages <= recipe.model.layers
        if world is not None:
            data = recipe.data_parallel(world)
            assert data * recipe.parallel.model_ranks == world and data % recipe.parallel.replicas == 0
            shares = recipe.batch.micro_batch * recipe.micro_batches(world) * data
            assert shares == recipe.batch.global_batch


@given(layouts(), st.integers(1, 64))
def test_what_is_refused_without_a_world_is_refused_with_any(layout, world):
    content, _ = layout
    assume(failing(seen(content, None)) > 0)
    with pytest.raises(RecipeError):
        parse_recipe(content, world=world)


TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def torch_takes(config: ParallelConfig, count: int) -> bool:
    """True if torch can construct the schedule, which lays out the passes of all ranks, on the first rank."""
    last = config.stages - 1
    mine = [0, last] if config.schedule == "zbv" else range(0, config.stages, config.pipeline)
    group = {"group_size": config.pipeline, "group_rank": 0, "num_stages": config.stages, "submod": None}
    stages = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == last, **group) for i in mine]
    try:
        TORCH[config.schedule](stages if len(stages) > 1 else stages[0], count, loss_fn=lambda *_: None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_micro_batches_are_refused_where_torch_refuses_them_or_ranks_would_be_idle(schedule, pipeline):
    for count in range(1, 4 * pipeline):
        content = {
            "model": {"preset": "tiny-125m"},
            "data": {"path": "x"},
            "batch": {"global_batch": count, "micro_batch": 1},
            "training": {"steps": 10},
            "parallel": {"pipeline": pipeline, "schedule": schedule},
        }
        config = ParallelConfig(**content["parallel"])
        try:
            accepted = parse_recipe(content, world=pipeline).micro_batches(pipeline) == count
        except RecipeError:
            accepted = False
        idle = schedule != "gpipe" and count < pipeline
        assert accepted == (torch_takes(config, count) and not idle), count


def test_defaults_are_one_process_and_a_run_may_go_on_in_another_layout():
    config = ParallelConfig()
    assert (config.stages, config.model_ranks, config.zero, config.schedule) == (1, 1, 1, "1f1b")
    properties = recipe_schema()["$defs"]
    for section in ("ParallelConfig", "MemoryConfig"):
        assert all("resume" not in field for field in properties[section]["properties"].values())


@pytest.mark.parametrize(
    ("schedule", "pipeline", "stated", "stages"),
    [
        ("gpipe", 4, None, 4),
        ("1f1b", 4, 1, 4),
        ("interleaved-1f1b", 4, None, 8),
        ("interleaved-zero-bubble", 4, 3, 12),
        ("zbv", 4, None, 8),
        ("zbv", 1, None, 1),
    ],
)
def test_stages(schedule, pipeline, stated, stages):
    assert ParallelConfig(pipeline=pipeline, schedule=schedule, virtual_stages=stated).stages == stages


@pytest.mark.parametrize(("name", "world", "data", "count"), [("hlat-7b", 2048, 256, 4), ("hlat-70b", 8192, 32, 32)])
def test_hlat_recipes_are_the_published_layouts(name, world, data, count):
    recipe = load_recipe(name, world=world)
    assert (recipe.data_parallel(world), recipe.micro_batches(world)) == (data, count)
