"""Presets of published models say what their config.json says, in the forms in which such files are found."""

from typing import Any

import pytest

from hlat.config import PRESETS, preset_called
from hlat.config.model_files import hf_to_model
from hlat.config.sections.model import ModelConfig
from hlat.model.counts import count_parameters

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


# Numbers of elements in the safetensors files of the hub, as their index or the model page says, tied embeddings once.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert count_parameters(ModelConfig(**PRESETS[name])).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "parameters"),
    # of transformers' GPT2LMHeadModel: gpt2, gpt2-medium, gpt2-large, gpt2-xl
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
    ],
)
def test_shapes_of_gpt2_have_its_number_of_parameters_within_a_hundredth(name, parameters):
    ours = count_parameters(ModelConfig(**PRESETS[name])).total
    assert ours == pytest.approx(parameters, rel=0.01)  # the names promise no more than their rounding


def test_every_preset_of_a_published_model_is_counted():
    assert PRESETS.keys() - PUBLISHED.keys() == {
        *("llama-3-405b", "llama-3.1-405b", "gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1.5b"),
        *("tiny-1m", "tiny-10m", "tiny-34m", "tiny-125m"),
    }


@pytest.mark.parametrize(
    ("spelling", "preset"),
    [
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama3.1_70B", "llama-3.1-70b"),
        ("llama2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("mistral-7b-v0.1-hf", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.3", None),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),
        ("TinyLlama/TinyLlama_v1.1", None),
        ("TinyLlama/TinyLlama-1.1B-Chat-v0.3", None),
        ("Qwen/Qwen2-7B-Instruct", None),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
        ("HuggingFaceTB/SmolLM-1.7B", None),
        ("llama-2-7b-v2", None),
        ("llama-3.3-70b", None),
        ("llama-99b", None),
    ],
)
def test_usual_spellings_mean_a_preset(spelling: str, preset: str | None) -> None:
    assert preset_called(spelling) == preset


def test_every_preset_means_itself() -> None:
    assert [preset_called(name.upper()) for name in PRESETS] == list(PRESETS)
