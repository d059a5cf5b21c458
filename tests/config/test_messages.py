"""Messages about invalid recipes: file, line, field, its meaning and what to write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hlat.config import Recipe, RecipeError, load_recipe
from hlat.config.explanations import _PATHS, FIELDS, SECTIONS
from hlat.config.load import parse_recipe

GOOD = {"model": {"preset": "tiny-1m"}, "data": {"path": "corpus.txt"}, "training": {"steps": 100}}


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(json.dumps(GOOD))
    return tmp_path / "good.yaml"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("3m", "= '3m': 3m may mean millions or minutes; write 3M, or the whole number."),
        (
            "three",
            "= 'three': must be a whole number, as in 100, 100M or 1e9. It means: Optimizer steps of the whole ",
        ),
        ("2001-99-99", "= '2001-99-99': must be a whole number, as in"),
        ("1:40", "= '1:40': must be a whole number, as in"),
        ("yes", "= 'true': must be a whole number, as in"),
        ("1.5", "= 1.5: must be a whole number."),
        ("1e400", "= inf: must be a finite number."),
        ("1" + "0" * 30, "no field takes a number of about 30 digits. Use one below 2**63."),
        ("!!int abc", "is not valid YAML: line 1: this is no int"),
        ("!!timestamp abc", "is not valid YAML: line 1: this is no timestamp"),
    ],
)
def test_a_number_that_is_none(good: Path, value: str, says: str) -> None:
    said = message(good, f"training.steps={value}")
    assert says in said and "  training.steps" in said


def test_numbers_of_yaml_1_2(good: Path) -> None:
    for text, steps in (("1_000", 1000), ("0100", 100), ("1e3", 1000), ("0x10", 16), ("+5", 5)):
        assert load_recipe(good, [f"training.steps={text}"]).training.steps == steps
    for text, rate in (("3e-4", 3e-4), (".5", 0.5), ("1.", 1.0), ("1.0E-3", 1e-3)):
        assert load_recipe(good, [f"optimizer.lr={text}"]).optimizer.lr == rate
    assert load_recipe(good, ["run.name=2026-01-31"]).run.name == "2026-01-31"


def test_the_file_and_the_line_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("run: {name: x}\nmodel:\n\theads: 3\n")
    said = message(tmp_path / "r.yaml")
    assert f"{tmp_path / 'r.yaml'}: is not valid YAML: line 3, column 1: " in said and "unicode string" not in said
    (tmp_path / "b.yaml").write_bytes(b"a: 1\nb: \xff\n")
    assert "b.yaml: cannot be read: it is not text in UTF-8: line 2 holds the byte 0xff; save it as UTF-8." in message(
        tmp_path / "b.yaml"
    )


def test_a_folder_is_not_a_recipe(good: Path) -> None:
    assert f"{good.parent}: is a folder. Name a file in it: {good}." in message(good.parent)


def test_an_empty_file_is_called_empty_and_no_field_is_listed(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert [(p.path, p.reason) for p in caught.value.problems] == [(str(tmp_path / "r.yaml"), "is empty.")]
    assert "model, data and training" in str(caught.value) and "hlat init" in str(caught.value)


def test_files_included_twice_are_read_once_and_a_circle_is_refused(good: Path) -> None:
    for number in range(30):
        (good.parent / f"{number}.yaml").write_text(f"include: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (good.parent / "30.yaml").write_text("include: good.yaml\n")
    assert load_recipe(good.parent / "0.yaml") == load_recipe(good)
    (good.parent / "30.yaml").write_text("include: 0.yaml\n")
    assert "includes form a cycle" in message(good.parent / "0.yaml")


def test_many_problems_are_counted() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({**GOOD, "data": {"sources": [1] * 500}})
    assert "500 problems" in str(caught.value) and "and 497 more of data.sources.N" in str(caught.value)


def test_names_on_one_line(good: Path) -> None:
    assert "run.a\\u000ab\\u001b" in message(good, "run.a\nb\x1b=1")


@pytest.mark.parametrize("name", ["/dev/zero", "/", "none", "pipe", "n" * 5000])
def test_a_configuration_that_cannot_be_read_says_why(tmp_path: Path, name: str) -> None:
    content = {**GOOD, "model": {"hf_config": name}}
    with pytest.raises(
        RecipeError, match=r"model\.hf_config = .*: cannot be read: .*\. Name a Hugging Face config"
    ) as caught:
        parse_recipe(content)
    assert len(caught.value.problems) == 1


def _kinds(section: type) -> list[tuple[str, list[str]]]:
    """(Dotted path, kinds) of every field ``kind`` of the recipe, from pydantic's own schema."""
    schema = section.model_json_schema()
    found: dict[str, list[str]] = {}

    def walk(node: Any, path: str) -> None:
        if "$ref" in node:
            walk(schema["$defs"][node["$ref"].rpartition("/")[2]], path)
        for each in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            walk(each, path)
        for name, below in node.get("properties", {}).items():
            if name == "kind" and path:
                named = below.get("enum", [below["const"]] if "const" in below else [])  # none: of the user's own
                found.setdefault(f"{path}.kind", []).extend(named)
            walk(below, f"{path}.{name}".strip("."))

    walk(schema, "")
    return sorted(found.items())


@pytest.mark.parametrize(("path", "kinds"), _kinds(Recipe))
def test_an_unknown_kind_is_answered_with_the_known_ones_and_the_nearest(path: str, kinds: list[str]) -> None:
    for wrong in ("soap", kinds[0][:-1], "", 3):
        content = dict(GOOD) | {path.partition(".")[0]: dict(GOOD.get(path.partition(".")[0], {}))}
        below = content
        for name in path.split(".")[:-1]:
            below = below.setdefault(name, {})
        below["kind"] = wrong
        with pytest.raises(RecipeError) as refusal:
            parse_recipe(content, "the recipe")
        (problem,) = [each for each in refusal.value.problems if each.path.startswith(path.rpartition(".")[0])]
        said = str(problem)
        assert problem.path == path and problem.value == wrong and all(kind in said for kind in kinds)
        assert len(said) < 400 and "pydantic" not in said and "discriminator" not in said
        if wrong == kinds[0][:-1]:
            assert f"Did you mean {kinds[0]!r}?" in said


def test_an_unknown_fault_is_one_problem() -> None:
    with pytest.raises(RecipeError) as refusal:
        parse_recipe({**GOOD, "faults": [{"kind": "kil", "at_step": 3}]}, "the recipe")
    (problem,) = refusal.value.problems
    assert problem.path == "faults.0.kind" and "Did you mean 'kill'?" in str(problem) and "enospc" in str(problem)


WRONG_NAMES = [
    # sections of other programs, and fields in them
    ({"train": {"steps": 3}}, "train: there is no such field. Here it is training: write training.steps."),
    ({"optim": {"learning_rate": 1}}, "optim: there is no such field. Here it is optimizer: write optimizer.lr."),
    ({"optim": "adamw_torch"}, "Here it is optimizer.kind."),
    ({"dataset": {"seq_len": 8}}, "Here it is data: write data.sequence_length."),
    ({"dataset": "x.txt"}, "Here it is data.path."),
    ({"scheduler": {"warmup": 8, "x": 1}}, "Here it is schedule: write schedule.warmup_steps."),
    ({"eval": {"eval_steps": 8}}, "Here it is evaluation: write evaluation.every_steps."),
    ({"parallelism": {"tensor_parallel_degree": 8}}, "Here it is parallel: write parallel.tensor."),
    ({"job": {"dump_folder": "x", "description": "y"}}, "Here it is run: write run.dir."),
    ({"logging": True}, "Here it is tracking."),
    # transformers' TrainingArguments
    ({"training": {"learning_rate": 1}}, "training.learning_rate: there is no such field. Here it is optimizer.lr."),
    ({"training": {"num_train_epochs": 3}}, "Here it is training.steps or training.tokens; passes over the text"),
    ({"per_device_train_batch_size": 4}, "Here it is batch.micro_batch."),
    ({"gradient_accumulation_steps": 4}, "Here it is batch.global_batch: a step accumulates until it is reached."),
    ({"warmup_ratio": 0.1}, "Here it is schedule.warmup_steps, a number of steps."),
    ({"report_to": "wandb"}, "Here it is tracking.wandb, tracking.mlflow or tracking.trackio."),
    ({"save_total_limit": 3}, "Here it is checkpoint.keep_last."),
    # torchtitan and nanochat
    ({"training": {"local_batch_size": 3}}, "Here it is batch.micro_batch."),
    ({"model": {"flavor": "8B"}}, "Here it is model.preset, or model.from for a model that exists."),
    ({"training": {"seq_len": 3}}, "Here it is data.sequence_length."),
    ({"depth": 20}, "Here it is model.layers."),
    ({"device_batch_size": 20}, "Here it is batch.micro_batch."),
    ({"num_iterations": 20}, "Here it is training.steps."),
    ({"final_lr_frac": 0.1}, "Here it is schedule.min_ratio, a share of optimizer.lr."),
    # hlat's own, somewhere else
    ({"every_steps": 5}, "write checkpoint.every_steps, evaluation.every_steps or integrity.every_steps."),
    ({"training": {"weight_decay": 5}}, "It is a field of optimizer: write optimizer.weight_decay"),
    ({"validation": {"fraction": 0.1}}, "It is a field of data: write data.validation"),
    ({"optimizer": "adamw"}, "Write optimizer: {kind: adamw}."),
    ({"schedule": "cosine"}, "Write schedule: {kind: cosine}."),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG_NAMES, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_name_is_told_what_it_is_here(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({**GOOD, **{name: _over(GOOD.get(name), value) for name, value in wrong.items()}})
    assert says in str(caught.value)


def _over(below: Any, value: Any) -> Any:
    return {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value


def test_what_a_wrong_name_is_here_exists() -> None:
    known = {"every", *_PATHS, *Recipe.model_fields}
    for name, meant in {**SECTIONS, **FIELDS}.items():
        assert name not in Recipe.model_fields, name
        named = re.findall(r"[a-z]\w*(?:\.\w+)+", meant) or [meant]
        assert meant.startswith(("--", "the same command", "model.from")) or set(named) - {"model.from"} <= known, meant


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({}, "model: lacks vocab_size, layers, hidden_size, intermediate_size and heads. "),
        ({}, "as in model.preset=tiny-10m, llama-3.2-1b or llama-3-8b (hlat recipe presets lists all), or give them."),
        ({"layers": 32, "hidden_size": 4096}, "model.preset=llama-2-7b, llama-3-8b or llama-3.1-8b ("),
        ({"preset": "llama-4-8b"}, "The nearest are llama-3-8b, llama-3.1-8b or llama-2-7b (hlat recipe presets"),
        ({"preset": ""}, "The nearest are tiny-10m, llama-3.2-1b or llama-3-8b"),
    ],
)
def test_a_model_without_sizes_is_one_line_that_names_presets(model: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({**GOOD, "model": model})
    said = str(caught.value)
    assert says in said and len(said.splitlines()) == 2 and len(said) < 400


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("model", r"preset=tiny-10m, llama-3\.2-1b or llama-3-8b"),
        ("data", r"Give data\.path=FILE_OR_FOLDER, .* hlat init"),
        ("training", r"Give training\.tokens or training\.steps, as in training\.tokens=100M\."),
    ],
)
def test_a_missing_section_is_told_what_to_give(section: str, says: str) -> None:
    with pytest.raises(RecipeError, match=rf"{section}: is required\. .*{says}"):
        parse_recipe({name: content for name, content in GOOD.items() if name != section})
