"""Options of architectures: fixed ones are set, others are refused with the architectures that have them."""

from typing import Any

import pytest

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.config.sections.model import ARCHITECTURES, OPTIONS, ModelConfig

SIZES = {"vocab_size": 512, "layers": 2, "hidden_size": 32, "intermediate_size": 96, "heads": 4}


def content(**model: Any) -> dict[str, Any]:
    """Recipe as a mapping."""
    return {"model": SIZES | model, "data": {"path": "none"}, "training": {"steps": 200}}


def problems(**model: Any) -> dict[str, str]:
    """Problems of a recipe, by field."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(content(**model))
    return {problem.path: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fixed_options_are_set_wherever_a_model_section_comes_from(name: str) -> None:
    resolved = parse_recipe(content(architecture=name)).model
    wanted = {**OPTIONS, **ARCHITECTURES[name].fixed}
    assert resolved.options == wanted == ModelConfig(**SIZES, architecture=name).options
    assert parse_recipe(content(**resolved.model_dump())).model == resolved


def test_everything_wrong_with_options_is_said_at_once() -> None:
    found = problems(architecture="olmo2", qkv_bias=True, qk_norm=True, sliding_window=5)
    assert set(found) == {"model.qkv_bias", "model.qk_norm", "model.sliding_window"}
    assert "do not have it" in found["model.sliding_window"] and "model.architecture=mistral" in str(found)
    assert "model.architecture=llama or qwen2 or qwen3" in found["model.qkv_bias"]
    assert "always have it" in problems(architecture="qwen2", qkv_bias=False)["model.qkv_bias"]
    assert set(problems(architecture="qwen3", sliding_window=0)) == {"model.sliding_window"}


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    message = problems(architecture="gpt2")["model.architecture"]
    assert all(name in message for name in ARCHITECTURES)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    model = ModelConfig(**SIZES, architecture="mistral", sliding_window=8)
    assert (model.window(8), model.window(9)) == (None, 8)
