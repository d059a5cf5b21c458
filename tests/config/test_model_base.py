"""``model.from``: the model, the initial weights and the tokenizer of a folder, from one line of a recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from hlat.config import Recipe, RecipeError, recipe_schema
from hlat.config.load import load_recipe, parse_recipe
from hlat.config.sections.model import HF_NAMES

CONFIG = {  # config.json of Qwen/Qwen2.5-0.5B, without what hlat does not read
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SAVED = {"layers": 2, "hidden_size": 32, "intermediate_size": 64, "heads": 2, "vocab_size": 300, "preset": "tiny-34m"}


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.model").write_bytes(b"")
    meta = {"step": 7, "recipe": {"model": SAVED, "data": {"sequence_length": 2048}}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def recipe(source: Path | None, **changes: Any) -> Recipe:
    content: dict[str, Any] = {"model": {"from": str(source)}, "data": {"path": "texts"}, "training": {"steps": 3}}
    content["batch"] = {"global_batch": 8}
    return parse_recipe({**content, **changes})


def problems(source: Any, **changes: Any) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        recipe(source, **changes)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_a_hugging_face_folder_gives_model_weights_and_tokenizer(hugging_face: Path) -> None:
    found = recipe(hugging_face)
    model = found.model
    assert (model.architecture, model.layers, model.hidden_size, model.heads) == ("qwen2", 24, 896, 14)
    assert (model.kv_heads, model.vocab_size, model.tie_embeddings, model.qkv_bias) == (2, 151936, True, True)
    assert (model.rope.theta, model.norm_eps, model.max_sequence_length) == (1e6, 1e-6, 32768)
    assert found.checkpoint.init_from == str(hugging_face)
    assert found.data.tokenizer.path == str(hugging_face)


def test_a_checkpoint_gives_the_same_and_the_context_it_was_trained_with(checkpoint: Path) -> None:
    found = recipe(checkpoint)
    assert (found.model.layers, found.model.hidden_size, found.model.vocab_size) == (2, 32, 300)
    assert found.model.preset is None, "the preset of the run that saved it may have been changed by that run"
    assert found.model.max_sequence_length == 2048
    assert found.checkpoint.init_from == str(checkpoint)
    assert found.data.tokenizer.path == str(checkpoint / "tokenizer")


def test_what_the_recipe_gives_lies_above(checkpoint: Path) -> None:
    own = {"path": "texts", "tokenizer": {"path": "other/tokenizer.json"}}
    found = recipe(checkpoint, model={"from": str(checkpoint), "max_sequence_length": 1024}, data=own)
    assert (found.model.max_sequence_length, found.model.layers) == (1024, 2)
    assert found.data.tokenizer.path == "other/tokenizer.json"


def test_the_resolved_recipe_gives_the_same_recipe_without_the_folder(checkpoint: Path) -> None:
    found = recipe(checkpoint)
    (checkpoint / "meta.json").unlink()
    assert parse_recipe(found.model_dump(mode="json")) == found


def test_the_folder_of_a_run_is_refused_with_the_newest_checkpoint_named(checkpoint: Path) -> None:
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        assert "step-00000007" in problems(folder)["model.from"]


def test_each_folder_that_cannot_be_used_says_why(tmp_path: Path, hugging_face: Path, checkpoint: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "neither meta.json" in problems(tmp_path / "empty")["model.from"]
    assert "no such folder" in problems(tmp_path / "none")["model.from"]
    (hugging_face / "tokenizer.json").unlink()
    assert "data.tokenizer.path" in problems(hugging_face)["model.from"]
    (checkpoint / "meta.json").write_text("{")
    assert "hlat checkpoint verify" in problems(checkpoint)["model.from"]
    (hugging_face / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gemma"}))
    assert "gemma" in " ".join(problems(hugging_face).values())


def test_two_sources_of_numbers_or_weights_are_refused(checkpoint: Path) -> None:
    both = problems(None, model={"from": str(checkpoint), "preset": "tiny-34m"})
    assert "both preset and from" in both["model.preset"]
    assert "checkpoint.init_from" in problems(checkpoint, checkpoint={"init_from": "elsewhere"})


def test_editors_know_the_field() -> None:
    assert "from" in recipe_schema()["$defs"]["ModelConfig"]["properties"]


def test_the_numbers_of_a_config_json_may_stand_in_the_model_section(hugging_face: Path) -> None:
    """The names are those of the published file, and the model is the same."""
    names = {*HF_NAMES, "vocab_size", "hidden_size", "intermediate_size"}
    written = recipe(None, model={name: CONFIG[name] for name in names if name in CONFIG}).model
    read = recipe(None, model={"hf_config": str(hugging_face)}).model
    assert written == read.model_copy(update={"hf_config": None})
    assert not HF_NAMES.keys() & written.model_dump().keys(), "what is stored has hlat's names"


def test_names_of_hugging_face_are_attributes_of_its_configurations() -> None:
    config = pytest.importorskip("transformers").LlamaConfig()
    assert all(hasattr(config, name) or name == "rope_theta" for name in HF_NAMES), "rope_theta is in rope_parameters"


@pytest.mark.parametrize(
    ("model", "overrides", "layers"),
    [
        ({"num_hidden_layers": 5}, (), 5),
        ({"num_hidden_layers": 5, "layers": 5}, (), 5),
        ({"layers": 4}, ("model.num_hidden_layers=5",), 5),
        ({"num_hidden_layers": 4}, ("model.layers=5",), 5),
        ({"num_hidden_layers": 4}, ("model.num_hidden_layers=5",), 5),
        ({}, ("model={preset: tiny-1m, num_hidden_layers: 5}",), 5),
    ],
)
def test_either_name_of_a_size(model: dict[str, Any], overrides: tuple[str, ...], layers: int, tmp_path: Path) -> None:
    content = {"model": {"preset": "tiny-1m", **model}, "data": {"path": "x"}, "training": {"steps": 3}}
    assert parse_recipe(content, overrides=overrides).model.layers == layers
    (tmp_path / "base.yaml").write_text(json.dumps({**content, "model": {"preset": "tiny-1m", "layers": 2}}))
    (tmp_path / "r.yaml").write_text(json.dumps({"include": "base.yaml", "model": content["model"]}))
    assert load_recipe(tmp_path / "r.yaml", overrides).model.layers == layers


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"num_hidden_layers": 5, "layers": 4}, "model.num_hidden_layers = 5: is model.layers here, which has another"),
        ({"rope_theta": 5.0, "rope": {"theta": 4.0}}, "model.rope_theta = 5.0: is model.rope.theta here"),
        ({"model_type": "qwen2", "architecture": "llama"}, "model.model_type = 'qwen2': is model.architecture here"),
    ],
)
def test_two_names_with_two_values_are_refused(model: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(None, model={"preset": "tiny-1m", **model})
    assert named in str(caught.value) and len(caught.value.problems) == 1
