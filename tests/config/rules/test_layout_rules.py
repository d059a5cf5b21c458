"""Impossible layouts, one mistake each: one message that names the field, its value, why, and what would work."""

import pytest
import yaml

from hlat.config import RecipeError, load_recipe

RECIPE = {
    "model": {
        "vocab_size": 1000,
        "layers": 12,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "heads": 16,
        "kv_heads": 4,
    },
    "data": {"path": "corpus.txt", "sequence_length": 528},
    "batch": {"global_batch": 64, "micro_batch": 2},
    "training": {"steps": 10},
}


# overrides, world, path and value, words of the reason, the whole remedy
IMPOSSIBLE = [
    ("tensor=3", None, "tensor = 3", "heads 16 cannot be shared out", "Try 2 or 4."),
    ("tensor=32", None, "tensor = 32", "heads 16 cannot be shared out", "Try 8 or 16."),
    ("tensor=16 model.intermediate_size=1544", None, "tensor = 16", "intermediate_size 1544", "Try 4 or 8."),
    ("tensor=4 model.heads=24 model.hidden_size=768 model.kv_heads=6", None, "tensor = 4", "kv_heads 6", "Try 2 or 3."),
    ("tensor=4 model.vocab_size=3 data.tokenizer.train=char", None, "tensor = 4", "without a row", "Try 1 or 2."),
    (
        "tensor=16 context=2 sequence=true", None, "tensor = 16", "sequence_length 528 / context 2 is not a multiple",
        "Try 4 or 8, or parallel.sequence=false.",
    ),
    ("context=5", None, "context = 5", "2 x 5 chunks", "Try 4 or 6."),
    ("pipeline=13", None, "pipeline = 13", "only the model's 12", "Try 11 or 12."),
    (
        "pipeline=8 schedule=zbv", None, "pipeline = 8", "8 ranks x 2 stages are more than the model's 12",
        "Try 5 or 6, or parallel.schedule=1f1b or gpipe.",
    ),
    (
        "pipeline=4 virtual_stages=2", None, "virtual_stages = 2", "1f1b has exactly 1 per rank",
        "Try 1, or parallel.schedule=interleaved-1f1b or interleaved-zero-bubble.",
    ),
    (
        "pipeline=4 virtual_stages=1 schedule=interleaved-1f1b", None, "virtual_stages = 1", "at least 2",
        "Try 2, or parallel.schedule=1f1b or gpipe.",
    ),
    (
        "pipeline=4 virtual_stages=3 schedule=zbv", None, "virtual_stages = 3", "zbv has exactly 2",
        "Try 2, or parallel.schedule=interleaved-1f1b or interleaved-zero-bubble.",
    ),
    ("virtual_stages=2", None, "virtual_stages = 2", "pipeline is 1", "Try 1."),
    ("split=[12]", None, "split = [12]", "pipeline is 1", "Try null."),
    (
        "pipeline=4 split=[4,4,4]", None, "split = [4, 4, 4]", "names 3 stages, the layout has 4",
        "Try null or [3, 3, 3, 3], or parallel.pipeline=3.",
    ),
    ("pipeline=2 split=[7,6]", None, "split = [7, 6]", "adds up to 13 layers", "Try null or [6, 6]."),
    ("pipeline=2 zero=2", None, "zero = 2", "keeps gradients whole", "Try 1 or 3."),
    (
        "pipeline=2 zero=3 schedule=zbv", None, "zero = 3", "cuts backward in two",
        "Try 1, or parallel.schedule=1f1b or interleaved-1f1b.",
    ),
    ("zero=0 replicas=2", None, "replicas = 2", "nothing is sharded", "Try 1, or parallel.zero=1 or 2."),
    ("replicas=3", 4, "replicas = 3", "data-parallel degree is 4", "Try 1 or 2."),
    ("replicas=4", 4, "replicas = 4", "nothing is sharded", "Try 1 or 2."),
    (
        "tensor=8", 4, "world = 4", "takes pipeline 1 x context 1 x tensor 8 = 8 processes",
        "Try 8 or 16 processes, or parallel.tensor=2 or 4.",
    ),
    (
        "tensor=2 pipeline=4", 12, "world = 12", "4 x context 1 x tensor 2 = 8 processes",
        "Try 8 or 16 processes, or parallel.pipeline=3 or 6.",
    ),
    (
        "tensor=2", 6, "batch.global_batch = 64", "3 data-parallel ranks (world 6 / 2)",
        "Try 60 or 66, or 4 or 8 processes.",
    ),
    (
        "tensor=1 batch.micro_batch=4", 32, "batch.micro_batch = 4", "32 data-parallel ranks",
        "Try 1 or 2, or batch.global_batch=128 or 256, or 8 or 16 processes.",
    ),
    ("batch.micro_batch=6", None, "batch.micro_batch = 6", "global_batch 64", "Try 4 or 8."),
    (
        "pipeline=4 schedule=1f1b batch.micro_batch=32", None, "pipeline = 4",
        "a step has 2 (global_batch 64 / micro_batch 32)",
        "Try 1 or 2, or batch.micro_batch=8 or 16, or parallel.schedule=gpipe, or batch.global_batch=128.",
    ),
    (
        "pipeline=4 schedule=1f1b", 64, "pipeline = 4", "64 / micro_batch 2 / data-parallel degree 16",
        "Try batch.micro_batch=1, or parallel.schedule=gpipe, or batch.global_batch=128, or 16 or 32 processes.",
    ),
    (
        "pipeline=4 schedule=interleaved-1f1b batch.global_batch=22", 4, "schedule = 'interleaved-1f1b'",
        "11 micro-batches of a step in 2 rounds", "Try 1f1b or gpipe, or batch.global_batch=20 or 24.",
    ),
]  # fmt: skip


def written(overrides: str) -> list[str]:
    """Overrides, where a name alone means a field of the parallel section."""
    return [text if "." in text.partition("=")[0] else f"parallel.{text}" for text in overrides.split()]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.mark.parametrize(("overrides", "world", "field", "reason", "remedy"), IMPOSSIBLE)
def test_an_impossible_layout_is_one_message(recipe, overrides, world, field, reason, remedy):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, written(overrides), world=world)
    (problem,) = caught.value.problems
    message = str(problem)
    assert f"{field}: " in message and reason in message and message.endswith(remedy), message


def test_the_recipe_they_are_made_from_is_good(recipe):
    assert load_recipe(recipe, world=8).micro_batches(8) == 4


@pytest.mark.parametrize(
    ("override", "says"), [("zero=4", "0, 1, 2 or 3"), ("schedule=2f2b", "'zbv'"), ("split=[0,12]", "greater than 0")]
)
def test_values_that_no_layout_has(recipe, override, says):
    with pytest.raises(RecipeError, match=says):
        load_recipe(recipe, written(override))


def test_all_that_is_wrong_with_a_layout_is_said_at_once(recipe):
    overrides = "tensor=3 context=5 pipeline=13 zero=2 batch.micro_batch=6 memory.activation_checkpointing=some"
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [*written(overrides), "training.steps=0"], world=7)
    assert [problem.path for problem in caught.value.problems] == [
        "batch.micro_batch",
        "training.steps",
        "parallel.tensor",
        "parallel.context",
        "parallel.pipeline",
        "parallel.zero",
        "memory.activation_checkpointing",
    ]


def test_independent_mistakes_in_world_and_layout_are_both_said(recipe):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, written("pipeline=2 zero=2 tensor=2"), world=6)
    assert {problem.path for problem in caught.value.problems} == {"world", "parallel.zero"}


# overrides, world, then of each problem: number of the stage, value, words of the reason, the whole remedy
WRONG_RAMPS = [
    ("8 32", "", None, []),
    ("9 32", "", None, [(0, 9, "batch.micro_batch = 2: global_batch 9 is not a multiple of it", "Try 8 or 10.")]),
    ("8 33 63", "", None, [(1, 33, "not a multiple", "Try 32 or 34."), (2, 63, "not a multiple", "Try 60 or 62.")]),
    ("8 64", "", None, [(1, 64, "batch.global_batch is 64; a ramp grows", "Use less than 64, or remove the stage.")]),
    ("32 32", "", None, [(0, 32, "next stage is 32; a ramp grows", "Use less than 32, or remove the stage.")]),
    ("8 36", "", 8, [(0, 8, "need a multiple of 16", "Try 16 or 32."), (1, 36, "need a multiple", "Try 32 or 48.")]),
    ("4 16", "pipeline=4", None, [(0, 4, "parallel.pipeline = 4: the schedule 1f1b needs at", "Try 8 or 10.")]),
    ("4 16", "pipeline=4 schedule=gpipe", None, []),
    ("8 16", "pipeline=4", 8, [(0, 8, "at least so many micro-batches, and a step has 2", "Remove the stage.")]),
    (
        "16 22", "pipeline=4 schedule=interleaved-1f1b", 4,
        [(1, 22, "parallel.schedule = interleaved-1f1b: it takes the 11 micro-batches", "Try 20 or 24.")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "overrides", "world", "problems"), WRONG_RAMPS)
def test_each_stage_of_a_ramp_has_to_fit_the_layout(recipe, sizes, overrides, world, problems):
    ramp = f"batch.ramp=[{', '.join(f'{{tokens: 10000, global_batch: {size}}}' for size in sizes.split())}]"
    asked = [ramp, *written(overrides)]
    if not problems:
        stages = load_recipe(recipe, asked, world=world).batch.ramp
        assert [stage.global_batch for stage in stages] == [int(size) for size in sizes.split()]
        return
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, asked, world=world)
    assert len(caught.value.problems) == len(problems), caught.value
    for found, (number, value, reason, remedy) in zip(caught.value.problems, problems, strict=True):
        assert (found.path, found.value) == (f"batch.ramp.{number}.global_batch", value)
        assert reason in found.reason and found.remedy == remedy, found
        assert {fix.path for fix in found.fixes} <= {found.path}


def test_a_remedy_for_another_field_fits_the_ramp_too(recipe):
    """Micro-batches of 16 and 32 divide 64, but not the batch of 24 sequences."""
    ramp = "batch.ramp=[{tokens: 10000, global_batch: 24}]"
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [ramp, "batch.micro_batch=24"])
    (problem,) = caught.value.problems
    assert problem.path == "batch.micro_batch" and problem.remedy == "Try 4 or 8."
