"""Absurdly large sizes are rejected with field name and maximum, before anything is allocated."""

import json
from pathlib import Path
from typing import Any

import pytest

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.config.sections.model import ModelConfig
from hlat.model.hf.folder import read_hf, write_hf
from hlat.model.parameter_layout import check_layers
from hlat.runtime.errors import CheckpointError
from tests.support.model.canonical import to_canonical
from tests.support.model.families import config_of, our_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = config_of("tied")
    tensors = {
        name: tensor.detach()
        for name, tensor in to_canonical(config, dict(our_model(config).named_parameters())).items()
    }
    return write_hf(tmp_path / "out", config, tensors)


def error_of(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        read_hf(folder)
    return str(caught.value)


@pytest.mark.parametrize("number", [10_001, 10**6, 10**9, 10**30])
def test_too_many_layers_are_rejected_at_once(folder: Path, number: int) -> None:
    """Regression: the names of all layers were created first; 10^6 layers took more than 25 s and unlimited memory."""
    assert (
        "num_hidden_layers" in (message := error_of(folder, num_hidden_layers=number)) and "more than 10,000" in message
    )


def test_many_layers_without_tensors_are_reported_in_one_line(folder: Path) -> None:
    message = error_of(folder, num_hidden_layers=10_000)
    assert "the model has 10,000 layers, but there are only" in message and message.count("\n") == 0


def test_missing_layers_are_listed_by_name_up_to_a_limit(folder: Path) -> None:
    message = error_of(folder, num_hidden_layers=999)
    assert (
        "model.layers.3.input_layernorm.weight: missing" in message and message.count("\n") < 110 and "more" in message
    )


@pytest.mark.parametrize(
    ("name", "number", "most"),
    [
        ("hidden_size", 10**30, "16,777,216"),
        ("intermediate_size", 2**24 + 1, "16,777,216"),
        ("num_attention_heads", 10**400, "16,777,216"),
        ("num_key_value_heads", 2**63, "16,777,216"),
        ("head_dim", 2**31, "16,777,216"),
        ("vocab_size", 2**31, "2,147,483,647"),
        ("max_position_embeddings", 10**30, "2,147,483,647"),
    ],
)
def test_a_size_above_its_maximum_is_rejected(folder: Path, name: str, number: int, most: str) -> None:
    message = error_of(folder, **{name: number})
    assert name in message and f"more than {most}" in message and len(message) < 500


@pytest.mark.parametrize(
    "fields", [{"hidden_size": 2**24}, {"vocab_size": 2**31 - 1}, {"intermediate_size": 2**24}, {"head_dim": 2**24}]
)
def test_the_largest_allowed_sizes_are_compared_with_the_files(folder: Path, fields: dict[str, int]) -> None:
    assert "do not fit the model" in error_of(folder, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 3, "head_dim": None}, "not a multiple"),
        ({"head_dim": 1}, "a head must be even"),
        ({"num_key_value_heads": 3}, "cannot be shared out"),
    ],
)
def test_impossible_numbers_of_heads_are_rejected(folder: Path, fields: dict[str, Any], words: str) -> None:
    """The rules of a recipe apply to config.json too."""
    assert words in error_of(folder, **fields)


BOUNDS = {
    "layers": 10_000, "hidden_size": 2**24, "intermediate_size": 2**24, "heads": 2**24, "kv_heads": 2**24,
    "head_dim": 2**24, "vocab_size": 2**31 - 1, "max_sequence_length": 2**31 - 1,
}  # fmt: skip


@pytest.mark.parametrize("number", [None, 10**10, 10**30])
@pytest.mark.parametrize("name", BOUNDS)
def test_recipes_have_the_same_maxima(name: str, number: int | None) -> None:
    number = BOUNDS[name] + 1 if number is None else number
    model = config_of("tied").model_dump() | {name: number}
    words = rf"model\.{name} = {number}: must be less than or equal to {BOUNDS[name]}"
    if number >= 2**63:
        words = rf"model\.{name}: no field takes a number of about 30 digits"
    with pytest.raises(RecipeError, match=words):
        parse_recipe({"model": model, "data": {"path": "x"}, "training": {"steps": 1}})


def test_layers_are_counted_before_their_names_are_created() -> None:
    config = ModelConfig(vocab_size=8, layers=10_000, hidden_size=8, intermediate_size=8, heads=2)
    with pytest.raises(CheckpointError, match="the model has 10,000 layers, but there are only 9,999 tensors"):
        check_layers(config, 9_999, "these weights")
    check_layers(config, 10_000, "these weights")
