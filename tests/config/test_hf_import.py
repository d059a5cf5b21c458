"""config.json files of transformers 4 and 5: what they mean, and everything in them that we refuse."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config import DynamicScaling, RecipeError, YarnScaling
from hlat.config.model_files import hf_to_model
from hlat.config.sections.model import ModelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def model(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate(hf_to_model({**LLAMA, **more}))


def problems(**more: Any) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        hf_to_model({**LLAMA, **more})
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_the_least_a_file_can_say() -> None:
    config = model()
    assert (config.layers, config.n_kv_heads, config.n_head_dim, config.norm_eps) == (2, 4, 16, 1e-5)
    assert config.rope.theta == 10000 and config.rope.scaling is None
    assert not (config.tie_embeddings or config.qkv_bias or config.qk_norm)


@pytest.mark.parametrize(
    "words",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_both_ways_of_writing_rope(words: dict[str, Any]) -> None:
    rope = model(**words).rope
    assert rope.theta == 5e5
    assert rope.scaling is not None and rope.scaling.kind == "llama3"
    assert rope.scaling.original_max_position == 8192


def test_linear_and_default_rope() -> None:
    linear = model(rope_scaling={"type": "linear", "factor": 2}).rope.scaling
    assert linear is not None and (linear.kind, linear.factor) == ("linear", 2.0)
    assert model(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope.theta == 7.0


def test_yarn_and_dynamic() -> None:
    """Absent fields of YaRN have the defaults of transformers; a dynamic file gives the context before scaling."""
    yarn = model(rope_scaling={**YARN, "finetuned": True, "mscale": None, "truncate": False}).rope.scaling
    assert yarn == YarnScaling(kind="yarn", factor=4.0, original_max_position=1024, truncate=False)
    assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)
    for missing in ({}, {"factor": None}):
        words = {"rope_type": "yarn", "original_max_position_embeddings": 1024, **missing}
        inferred = model(max_position_embeddings=40960, rope_parameters=words).rope.scaling
        assert inferred == YarnScaling(kind="yarn", factor=40.0, original_max_position=1024)
    stretched = model(max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": 2.5})
    assert stretched.max_sequence_length == 10240
    assert stretched.rope.scaling == DynamicScaling(kind="dynamic", factor=2.5, original_max_position=4096)


def test_a_window_between_both_contexts_of_a_dynamic_scaling_counts() -> None:
    words = {"model_type": "mistral", "num_key_value_heads": 2, "max_position_embeddings": 4096}
    assert model(sliding_window=4096, **words).sliding_window is None
    scaling = {"type": "dynamic", "factor": 4.0}
    assert model(sliding_window=4096, rope_scaling=scaling, **words).sliding_window == 4096


def test_a_null_theta_beside_that_of_rope_parameters_is_none() -> None:
    """Witness: the configuration of transformers."""
    fields = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    library = pytest.importorskip("transformers").LlamaConfig.from_dict(dict(fields))
    if hasattr(library, "rope_parameters"):  # 5
        assert library.rope_parameters["rope_theta"] == model(**fields).rope.theta == 7.0
    with pytest.raises(RecipeError, match="rope_theta"):
        model(rope_theta=None)


def test_families() -> None:
    more = {"num_key_value_heads": 2}
    assert model(model_type="mistral", sliding_window=None, **more).n_kv_heads == 2
    assert model(model_type="mistral", sliding_window=4096, max_position_embeddings=4096, **more)
    qwen2 = model(model_type="qwen2", use_sliding_window=False, sliding_window=4096, **more)
    assert qwen2.qkv_bias and not qwen2.qk_norm
    qwen3 = model(model_type="qwen3", **more)
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.n_head_dim == 128
    assert model(model_type="qwen3", attention_bias=True, head_dim=32, **more).qkv_bias
    assert model(attention_bias=True).qkv_bias


FAMILY_FILES: tuple[dict[str, Any], ...] = (
    {"model_type": "olmo3"},
    {"model_type": "olmo3", "sliding_window": 64, "max_position_embeddings": 64, "rope_theta": 500000.0},
    {
        "model_type": "olmo3",
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    {
        "model_type": "olmo3",
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 70.0},
        },
    },
    {"model_type": "gemma2"},
    {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": 7.0, "sliding_window": 32},
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_local_base_freq": 50.0, "rope_theta": 60.0},
    {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 32},
    {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    },
    {"model_type": "gpt_oss", "num_local_experts": 1, "num_experts_per_tok": 1},
    {
        "model_type": "gpt_oss",
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "head_dim": 32,
        "sliding_window": 12,
        "layer_types": ["full_attention"] * 6 + ["sliding_attention"],
        "rope_theta": 70.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    {"model_type": "phi3", "num_key_value_heads": None},
    {"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_theta": 70.0},
    {"model_type": "phi3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"model_type": "smollm3"},
    {"model_type": "smollm3", "no_rope_layer_interval": 3, "tie_word_embeddings": False, "rope_theta": 9.0},
    {"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1, 1, 0, 0]},
    {"model_type": "ministral"},
    {"model_type": "ministral", "sliding_window": None},
    {"model_type": "ministral", "sliding_window": 12, "layer_types": ["sliding_attention"] * 6 + ["full_attention"]},
)


@pytest.mark.parametrize("fields", FAMILY_FILES, ids=str)
def test_layers_are_those_of_transformers(fields: dict[str, Any]) -> None:
    """Window, frequencies and rotation of each layer; sizes; whatever of it a file leaves out."""
    auto = pytest.importorskip("transformers").AutoConfig
    content = LLAMA | {"num_hidden_layers": 7, "num_key_value_heads": 2, "pad_token_id": None} | fields
    library = auto.for_model(**json.loads(json.dumps(content)))
    read = ModelConfig.model_validate(hf_to_model(content))
    for index in range(read.layers):
        kind = read.layer_kind(index)
        has_window = getattr(library, "layer_types", [""] * 7)[index] == "sliding_attention"
        assert kind.window == (library.sliding_window if has_window else None)
        assert (kind.rope is None) == (not getattr(library, "no_rope_layers", [1] * 7)[index])
        if kind.rope is not None:
            ropes = library.rope_parameters
            theirs = ropes if "rope_theta" in ropes else ropes[library.layer_types[index]]
            assert kind.rope.theta == theirs["rope_theta"]
            assert getattr(kind.rope.scaling, "factor", None) == theirs.get("factor")
            assert getattr(kind.rope.scaling, "truncate", True) == theirs.get("truncate", True)
            assert kind.rope.partial_rotary_factor == theirs.get("partial_rotary_factor", 1.0)
    assert (read.n_kv_heads, read.n_head_dim) == (library.num_key_value_heads, getattr(library, "head_dim", None) or 16)
    assert read.tie_embeddings == library.tie_word_embeddings and read.norm_eps == library.rms_norm_eps
    if "gemma" in fields["model_type"]:
        assert (read.query_pre_attn_scalar or read.n_head_dim) == library.query_pre_attn_scalar
        assert read.n_head_dim == library.head_dim
    if fields["model_type"] == "gemma2":
        caps = read.attn_logit_softcapping, read.final_logit_softcapping
        assert caps == (library.attn_logit_softcapping, library.final_logit_softcapping)


def test_everything_wrong_is_said_at_once() -> None:
    found = problems(
        model_type="gpt2",
        hidden_size=None,
        vocab_size="many",
        num_hidden_layers=0,
        hidden_act="gelu",
        mlp_bias=True,
        attention_dropout=0.1,
        quantization_config={"bits": 4},
        use_sliding_window=True,
        sliding_window=512,
        torch_dtype="float8_e4m3fn",
        rope_scaling={"rope_type": "longrope", "factor": 4.0},
        rms_norm_eps=-1.0,
        tie_word_embeddings="yes",
        num_key_value_heads=2.5,
    )
    assert set(found) == {
        "model_type",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "hidden_act",
        "mlp_bias",
        "attention_dropout",
        "quantization_config",
        "sliding_window",
        "dtype",
        "rope_scaling.rope_type",
        "rms_norm_eps",
        "tie_word_embeddings",
        "num_key_value_heads",
    }
    assert (
        "gemma3_text, gpt_oss, llama, ministral, mistral, olmo2, olmo3, phi3, qwen2, qwen3, smollm3"
        in found["model_type"]
    )
    assert "'longrope'" in found["rope_scaling.rope_type"] and "dynamic, yarn" in found["rope_scaling.rope_type"]


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": "long"}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, "factor"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow"),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "max_position_embeddings"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "qwen2"}, "num_key_value_heads"),
        ({"model_type": "olmo2", "attention_bias": True}, "attention_bias"),
        ({"model_type": "olmo3", "rope_theta": 10000.0}, "rope_theta"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"model_type": "olmo3", "sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "smollm3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma2", "final_logit_softcapping": "x"}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": "x"}, "query_pre_attn_scalar"),
        ({"model_type": "gpt_oss"}, "num_local_experts"),
        ({"model_type": "gpt_oss", "num_local_experts": 1}, "num_experts_per_tok"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias"),
        ({"model_type": "gpt_oss", "swiglu_limit": 6.0}, "swiglu_limit"),
        ({"model_type": "gpt_oss", "swiglu_alpha": None}, "swiglu_alpha"),
        ({"model_type": "gpt_oss", "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "phi3", "rope_scaling": YARN}, "rope_scaling.rope_type"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (
            {"model_type": "phi3", "partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": None}},
            "partial_rotary_factor",
        ),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop"),
        ({"head_dim": -1}, "head_dim"),
        ({"dtype": "int8"}, "dtype"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_single_mistakes(more: dict[str, Any], path: str) -> None:
    assert path in problems(**more)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (
    *LLAMA, *LLAMA3, "num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range",
    "attention_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "mlp_bias",
    "layer_types", "no_rope_layers", "query_pre_attn_scalar", "sliding_window_pattern", "model_type",
    "attention_dropout", "quantization_config", "sliding_window", "use_sliding_window",
    "dtype", "torch_dtype", "partial_rotary_factor", "num_local_experts", "swiglu_limit",
)  # fmt: skip
_ROPE = st.dictionaries(
    st.sampled_from([*LLAMA3, *YARN, "rope_type", "type", "mscale", "truncate", "rope_theta"]), _JSON
)
_FAMILIES = ("llama", "mistral", "olmo3", "smollm3", "gemma3_text", "gpt_oss", "phi3", "qwen2", "qwen3")
_SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic")
_KINDS = st.sampled_from([*_FAMILIES, *_SCALINGS, "sliding_attention", "full_attention"])


@given(changes=st.dictionaries(st.sampled_from(_FIELDS), _JSON | _ROPE | _KINDS | st.lists(_KINDS)))
def test_any_json_in_a_field_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        fields = hf_to_model({**LLAMA, **changes})
    except RecipeError as error:
        assert error.problems and str(error)
    else:
        ModelConfig.model_validate(fields)


@given(content=_JSON)
def test_any_json_file_is_refused(content: Any) -> None:
    """None of them names a model type."""
    with pytest.raises(RecipeError):
        hf_to_model(content)
