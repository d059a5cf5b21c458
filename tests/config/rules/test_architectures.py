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
    assert "do not have it" in found["model.sliding_window"]
    having = "gemma2 or gemma3_text or gpt_oss or ministral or mistral or olmo3 or phi3"
    assert f"model.architecture={having}" in found["model.sliding_window"]
    assert "model.architecture=gpt_oss or llama or qwen2 or qwen3" in found["model.qkv_bias"]
    assert "always have it" in problems(architecture="qwen2", qkv_bias=False)["model.qkv_bias"]
    assert set(problems(architecture="qwen3", sliding_window=0)) == {"model.sliding_window"}


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    message = problems(architecture="gpt2")["model.architecture"]
    assert all(name in message for name in ARCHITECTURES)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    model = ModelConfig(**SIZES, architecture="mistral", sliding_window=8)
    assert (model.window(8), model.window(9)) == (None, 8)


PHI3 = {"architecture": "phi3", "layer_types": None}
LOCAL = {"architecture": "olmo3", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def test_patterns_are_repeated_over_the_layers() -> None:
    model = ModelConfig(**SIZES | {"layers": 5}, **LOCAL, local_rope={"theta": 7.0}, rope_layers=[True, True, False])
    assert model.windows(100) == (5, None, 5, None, 5) and model.windows(5) == (None,) * 5
    kinds = [model.layer_kind(index) for index in range(5)]
    assert [kind.rope and kind.rope.theta for kind in kinds] == [7.0, 10000.0, None, 10000.0, 7.0]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"sliding_window": None}, "model.sliding_window"),
        ({"layer_types": ["full_attention"]}, "model.sliding_window"),
        ({"layer_types": ["sliding_attention"] * 3}, "model.layer_types"),
        ({"layer_types": []}, "model.layer_types"),
        ({"layer_types": ["sliding"]}, "model.layer_types.0"),
        ({"sliding_window": None, "layer_types": None, "local_rope": {"theta": 7.0}}, "model.local_rope"),
        ({"architecture": "smollm3", "layer_types": ["full_attention"]}, "model.layer_types"),
        ({"rope_layers": [True]}, "model.rope_layers"),
        ({"query_pre_attn_scalar": 8}, "model.query_pre_attn_scalar"),
        ({"attention_sinks": True}, "model.attention_sinks"),
        ({"architecture": "gpt_oss", "attention_sinks": False}, "model.attention_sinks"),
        ({"rope": {"partial_rotary_factor": 0.5}}, "model.rope.partial_rotary_factor"),
        ({"local_rope": {"partial_rotary_factor": 0.5}}, "model.local_rope.partial_rotary_factor"),
        ({**PHI3, "rope": {"partial_rotary_factor": 0.4}}, "model.rope.partial_rotary_factor"),
        ({**PHI3, "rope": {"partial_rotary_factor": 0.1}}, "model.rope.partial_rotary_factor"),
        ({**PHI3, "rope": {"scaling": {"kind": "linear", "factor": 2.0}}}, "model.rope.scaling.kind"),
    ],
)
def test_patterns_and_windows_have_to_fit(changes: dict[str, Any], path: str) -> None:
    assert path in problems(**LOCAL | changes)
