"""Presets of published models say what their config.json says, in the forms in which such files are found."""

from typing import Any

import pytest

from hlat.config import PRESETS
from hlat.config.files import hf_to_model
from hlat.config.sections import ModelConfig

LLAMA31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
OF_TRANSFORMERS = {"use_cache": True, "torch_dtype": "bfloat16", "hidden_act": "silu", "initializer_range": 0.02}


def config_json(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Content of a config.json: vocabulary, width, inner width, layers, query heads, key heads, and the rest."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = dict(zip((*names, "num_key_value_heads"), sizes, strict=True))
    return {"model_type": kind, **OF_TRANSFORMERS, **fields, **more}


QWEN25 = {"max_window_layers": 28, "use_sliding_window": False, "sliding_window": 131072, "attention_dropout": 0.0}
FILES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": config_json(
        "llama",
        (128256, 4096, 14336, 32, 32, 8),
        rope_theta=500000.0,
        rope_scaling=LLAMA31_ROPE,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
    ),
    "llama-3.2-1b": config_json(
        "llama",
        (128256, 2048, 8192, 16, 32, 8),
        rope_theta=500000.0,
        rope_scaling={**LLAMA31_ROPE, "factor": 32.0},
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        head_dim=64,
    ),
    "qwen2.5-7b": config_json(
        "qwen2",
        (152064, 3584, 18944, 28, 28, 4),
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        **QWEN25,
    ),
    "qwen3-8b": config_json(
        "qwen3",
        (151936, 4096, 12288, 36, 32, 8),
        head_dim=128,
        rope_theta=1000000,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        attention_bias=False,
        sliding_window=None,
        use_sliding_window=False,
        max_window_layers=36,
    ),
    "mistral-7b": config_json(
        "mistral",
        (32000, 4096, 14336, 32, 32, 8),
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        sliding_window=4096,
    ),
    "smollm2-135m": config_json(
        "llama",
        (49152, 576, 1536, 30, 9, 3),
        initializer_range=0.041666666666666664,
        rope_theta=100000,
        rope_scaling=None,
        rope_interleaved=False,
        is_llama_config=True,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "tinyllama-1.1b": config_json(
        "llama",
        (32000, 2048, 5632, 22, 32, 4),
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        pretraining_tp=1,
        rope_scaling=None,
        tie_word_embeddings=False,
    ),
}
NOT_IN_FILES = {"preset", "hf_config", "coalesce", "init_scaled_outputs"}


def computed(fields: dict[str, Any]) -> dict[str, Any]:
    config = ModelConfig.model_validate(fields)
    return config.model_dump(exclude=NOT_IN_FILES) | {"kv_heads": config.n_kv_heads, "head_dim": config.n_head_dim}


@pytest.mark.parametrize("name", FILES)
def test_a_preset_is_the_model_of_its_config_json(name: str) -> None:
    assert computed(PRESETS[name]) == computed(hf_to_model(FILES[name]))


@pytest.mark.parametrize("name", FILES)
def test_transformers_5_files_are_the_same_models(name: str) -> None:
    """It writes RoPE as one mapping, and the data type under another name."""
    older = dict(FILES[name])
    rope = {"rope_type": "default", **(older.pop("rope_scaling", None) or {})}
    newer = {**older, "rope_parameters": {"rope_theta": older.pop("rope_theta", 10000.0), **rope}}
    newer["dtype"] = newer.pop("torch_dtype")
    newer.pop("rope_theta", None)
    if name.startswith("qwen"):
        newer["layer_types"] = ["full_attention"] * newer["num_hidden_layers"]
    assert computed(hf_to_model(newer)) == computed(PRESETS[name])
