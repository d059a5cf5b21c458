"""Laws of the recipe: all mistakes at once, each with its remedy; resolved once, the same for ever."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from hlat.config import PRESETS, Problem, Recipe, RecipeError, load_recipe
from hlat.config.load import parse_recipe

GOOD = {"model": {"preset": "tiny-1m"}, "data": {"path": "corpus.txt"}, "training": {"steps": 100}}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 64}


def problems_of(content: dict, overrides: tuple[str, ...] = (), tmp: Path | None = None) -> dict[str, Problem]:
    with pytest.raises(RecipeError) as caught:
        if tmp is None:
            parse_recipe(content)
        else:
            (tmp / "r.yaml").write_text(json.dumps(content))
            load_recipe(tmp / "r.yaml", overrides)
    return {problem.path: problem for problem in caught.value.problems}


def test_ten_mistakes_are_all_reported_at_once_with_their_remedies(tmp_path):
    found = problems_of(
        {
            "run": {"nam": "x"},
            "model": {"preset": "tiny-10m", "heads": 7, "norm_eps": "abc"},
            "traning": {"steps": 5},
            "data": {"sequence_length": 64, "tokenizer": {"vocab_size": 9000}},
            "batch": {"global_batch": 32, "micro_batch": 5},
            "optimizer": {"lr": -1},
            "schedule": {"warmup_steps": 1000, "kind": "cosin"},
            "training": {"steps": 100},
        },
        ("training.seed=abc", "nonsense"),
        tmp_path,
    )
    assert found["run.nam"].remedy == "Did you mean 'name'?"
    assert "Try 6 or 8" in found["model.heads"].remedy and found["model.heads"].value == 7
    assert found["model.norm_eps"].value == "abc"
    assert found["traning"].remedy == "Did you mean 'training'?"
    assert "data.path" in found
    assert "Set model.vocab_size to 9000" in found["data.tokenizer.vocab_size"].remedy
    assert found["batch.micro_batch"].remedy == "Try 2 or 4."
    assert found["optimizer.lr"].value == -1
    assert "'cosine'" in found["schedule.kind"].reason
    assert "Use at most 99" in found["schedule.warmup_steps"].remedy
    assert found["training.seed"].value == "abc"
    assert "section.field=value" in found["nonsense"].remedy
    assert len(found) >= 12


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"model": {"preset": "tiny-1m", "kv_heads": 3}}, "model.kv_heads"),
        ({"model": {"preset": "tiny-1m", "head_dim": 33}}, "model.head_dim"),
        ({"model": {"preset": "tiny-2m"}}, "model.preset"),
        ({"model": {"preset": "tiny-1m", "hf_config": "x"}}, "model.preset"),
        ({"model": {"hf_config": "no/such/config.json"}}, "model.hf_config"),
        (
            {
                "model": {"preset": "tiny-1m", "max_sequence_length": 128},
                "data": {"path": "corpus.txt", "sequence_length": 1024},
            },
            "data.sequence_length",
        ),
        (
            {"model": {"preset": "tiny-1m", "rope": {"scaling": {"kind": "llama3", "low_freq_factor": 4.0}}}},
            "model.rope.scaling.high_freq_factor",
        ),
        (
            {"model": {"preset": "tiny-1m", "rope": {"scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}}},
            "model.rope.scaling.beta_fast",
        ),
        ({"model": {"preset": "tiny-1m", "rope": {"theta": 1.0, "scaling": YARN}}}, "model.rope.scaling.kind"),
        (
            {"model": {"preset": "tiny-1m", "head_dim": 2, "rope": {"scaling": {**YARN, "kind": "dynamic"}}}},
            "model.rope.scaling.kind",
        ),
        (
            {"model": {"preset": "tiny-1m", "rope": {"scaling": {"kind": "linear", "factr": 2}}}},
            "model.rope.scaling.factr",
        ),
        ({"model": {"preset": ["a"]}}, "model.preset"),
        ({"training": {"steps": 1, "seed": 2**64}}, "training.seed"),
        ({"training": {}}, "training.steps"),
        ({"training": {"steps": 10, "tokens": 10}}, "training.steps"),
        ({"data": {}}, "data.path"),
        ({"data": {"path": "a", "sources": [{"path": "b"}]}}, "data.path"),
        ({"data": {"sources": [{"paht": "b"}]}}, "data.sources.0.paht"),
        ({"data": {"path": "a", "tokenizer": {"vocab_size": 100}}}, "data.tokenizer.vocab_size"),
        ({"data": {"path": "a", "validation": {"fraction": 1.0}}}, "data.validation.fraction"),
        ({"data": {"path": "a", "validation": {"fraction": 0.2, "path": "b"}}}, "data.validation.fraction"),
        ({"schedule": {"warmup_steps": 100}}, "schedule.warmup_steps"),
        ({"schedule": {"kind": "wsd", "warmup_steps": 50, "decay_fraction": 0.9}}, "schedule.decay_fraction"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1"),
        ({"run": {"name": "../up"}}, "run.name"),
    ],
)
def test_each_rule_names_the_field(change, path):
    assert path in problems_of({**GOOD, **change})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_recipe_is_a_fixed_point(preset):
    resolved = parse_recipe({**GOOD, "model": {"preset": preset, "vocab_size": 8192}})
    assert resolved.model.vocab_size == 8192, "what the recipe says goes above the preset"
    assert parse_recipe(json.loads(json.dumps(resolved.model_dump(mode="json")))) == resolved


def test_includes_merge_below_the_file_and_overrides_above(tmp_path):
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 1e-3, weight_decay: 0.2}\ntraining: {steps: 1e3}\n")
    (tmp_path / "r.yaml").write_text(
        "include: base.yaml\nmodel: {preset: tiny-1m}\n"
        "data: {sources: [{path: a}, {path: b}]}\noptimizer: {lr: 2.0e-3}\n"
    )
    recipe = load_recipe(tmp_path / "r.yaml", ["data.sources.1.path=c", "training.seed=7", "evaluation.sequences=null"])
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (2e-3, 0.2)
    assert (recipe.training.steps, recipe.training.seed, recipe.evaluation.sequences) == (1000, 7, None)
    assert [source.path for source in recipe.data.sources] == ["a", "c"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("include: r.yaml\n", "cycle"),
        ("include: gone.yaml\n", "gone.yaml"),
        ("a: 1\na: 2\n", "twice"),
        ("- a\n", "not a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("include: 5\n", "include"),
        ("? [a, b]\n: 3\n", "not a name"),
        ("!!python/object/apply:os.system ['echo owned']\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, says):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=says):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("override", ["data.path.deeper=1", "training.steps.0=x", "model=[", "=3", "a..b=1"])
def test_an_override_that_cannot_be_applied_is_named(tmp_path, override):
    assert override in problems_of(GOOD, (override,), tmp_path)


def test_a_missing_recipe_lists_the_shipped_ones():
    with pytest.raises(RecipeError, match="quickstart"):
        load_recipe("no-such-recipe")


def test_every_field_has_a_one_sentence_description():
    def walk(section: type[BaseModel]) -> None:
        for name, field in section.model_fields.items():
            assert (field.description or "").endswith("."), f"{section.__name__}.{name}"
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                walk(inner)

    walk(Recipe)
    jsonschema = json.dumps(Recipe.model_json_schema())
    assert "Sequences per optimizer step" in jsonschema, "the schema for editors carries the descriptions"


@given(st.integers(1, 10**13), st.integers(1, 4096), st.integers(2, 8192))
def test_a_budget_in_tokens_is_rounded_up_to_whole_steps(tokens, batch, length):
    recipe = parse_recipe(
        {
            "model": {"preset": "tiny-1m"},
            "data": {"path": "x", "sequence_length": length},
            "batch": {"global_batch": batch, "micro_batch": batch},
            "training": {"tokens": tokens},
        }
    )
    assert (recipe.total_steps - 1) * recipe.tokens_per_step < tokens <= recipe.total_steps * recipe.tokens_per_step
