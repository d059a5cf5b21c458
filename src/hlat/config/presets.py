"""Built-in models: their numbers, each with its source in a comment."""

import re
from typing import Any

_LLAMA31_SCALING = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 8192,
}


def _model(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        **more,
    }


_LLAMA_405B = _model(
    *(126, 16384, 53248, 128, 8, 128256),
    max_sequence_length=131072,
    rope={"theta": 500000.0, "scaling": _LLAMA31_SCALING},
)
_LLAMA31: dict[str, Any] = {"norm_eps": 1e-5, "max_sequence_length": 131072}
_LLAMA3 = {"rope": {"theta": 500000.0}, "norm_eps": 1e-5, "max_sequence_length": 8192}


def _qwen25(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    common = {"architecture": "qwen2", "rope": {"theta": 1000000.0}, "norm_eps": 1e-6, "max_sequence_length": 131072}
    return _model(layers, hidden, ffn, heads, kv_heads, vocab, **{**common, **more})


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> dict[str, Any]:
    common = {"architecture": "qwen3", "head_dim": 128, "rope": {"theta": 1000000.0}, "norm_eps": 1e-6}
    return _model(layers, hidden, ffn, heads, 8, 151936, max_sequence_length=40960, **common, **more)


def _gpt2(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _model(layers, hidden, ffn, heads, heads, 50257, tie_embeddings=True, max_sequence_length=1024)


PRESETS: dict[str, dict[str, Any]] = {
    # HLAT's two models: arXiv 2404.10630 and the configuration files of awslabs/HLAT.
    "llama-2-7b": _model(32, 4096, 11008, 32, 32, 32000, max_sequence_length=4096),
    "llama-2-13b": _model(40, 5120, 13824, 40, 40, 32000, max_sequence_length=4096),  # arXiv 2307.09288; config.json
    "llama-2-70b": _model(80, 8192, 28672, 64, 8, 32000, max_sequence_length=4096),
    # "The Llama 3 herd of models", arXiv 2407.21783, table 3; published config.json files.
    "llama-3-8b": _model(32, 4096, 14336, 32, 8, 128256, **_LLAMA3),
    "llama-3-70b": _model(80, 8192, 28672, 64, 8, 128256, **_LLAMA3),
    "llama-3-405b": _LLAMA_405B,  # a name of its table 3; the model was released as Llama 3.1
    "llama-3.1-405b": _LLAMA_405B,
    # The config.json files of meta-llama/Llama-3.1-8B and Llama-3.2-1B.
    "llama-3.1-8b": _model(
        32, 4096, 14336, 32, 8, 128256, rope={"theta": 500000.0, "scaling": _LLAMA31_SCALING}, **_LLAMA31
    ),
    "llama-3.1-70b": _model(
        80, 8192, 28672, 64, 8, 128256, rope={"theta": 500000.0, "scaling": _LLAMA31_SCALING}, **_LLAMA31
    ),
    "llama-3.2-1b": _model(
        *(16, 2048, 8192, 32, 8, 128256),
        tie_embeddings=True,
        rope={"theta": 500000.0, "scaling": {**_LLAMA31_SCALING, "factor": 32.0}},
        **_LLAMA31,
    ),
    "llama-3.2-3b": _model(
        *(28, 3072, 8192, 24, 8, 128256),
        tie_embeddings=True,
        rope={"theta": 500000.0, "scaling": {**_LLAMA31_SCALING, "factor": 32.0}},
        **_LLAMA31,
    ),
    # The config.json files of Qwen/Qwen2.5-*; "Qwen2.5 technical report", arXiv 2412.15115, table 1.
    "qwen2.5-0.5b": _qwen25(24, 896, 4864, 14, 2, 151936, tie_embeddings=True, max_sequence_length=32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 8960, 12, 2, 151936, tie_embeddings=True),
    "qwen2.5-3b": _qwen25(36, 2048, 11008, 16, 2, 151936, tie_embeddings=True, max_sequence_length=32768),
    "qwen2.5-7b": _qwen25(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _qwen25(48, 5120, 13824, 40, 8, 152064, norm_eps=1e-5),
    "qwen2.5-32b": _qwen25(64, 5120, 27648, 40, 8, 152064, norm_eps=1e-5),
    "qwen2.5-72b": _qwen25(80, 8192, 29568, 64, 8, 152064, norm_eps=1e-5),
    # The config.json files of Qwen/Qwen3-*; "Qwen3 technical report", arXiv 2505.09388, table 1.
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tie_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tie_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    # "Mistral 7B", arXiv 2310.06825, table 1; config.json of mistralai/Mistral-7B-v0.1. Later versions have no window,
    # and v0.3 has a vocabulary of 32768 and theta 1000000.
    "mistral-7b": _model(
        *(32, 4096, 14336, 32, 8, 32000),
        architecture="mistral",
        sliding_window=4096,
        rope={"theta": 10000.0},
        norm_eps=1e-5,
        max_sequence_length=32768,
    ),
    # "SmolLM2", arXiv 2502.02737; the config.json files of HuggingFaceTB/SmolLM2-*.
    "smollm2-135m": _model(
        *(30, 576, 1536, 9, 3, 49152),
        tie_embeddings=True,
        rope={"theta": 100000.0},
        norm_eps=1e-5,
        init_std=1 / 24,
        max_sequence_length=8192,
    ),
    "smollm2-360m": _model(
        *(32, 960, 2560, 15, 5, 49152),
        tie_embeddings=True,
        rope={"theta": 100000.0},
        norm_eps=1e-5,
        max_sequence_length=8192,
    ),
    "smollm2-1.7b": _model(
        *(24, 2048, 8192, 32, 32, 49152),
        tie_embeddings=True,
        rope={"theta": 130000.0},
        norm_eps=1e-5,
        max_sequence_length=8192,
    ),
    # "TinyLlama", arXiv 2401.02385, table 1; config.json of TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T.
    "tinyllama-1.1b": _model(22, 2048, 5632, 32, 4, 32000, norm_eps=1e-5, max_sequence_length=2048),
    # LLaMA-class models of GPT-2's width, depth, heads, vocabulary and context ("Language models are unsupervised
    # multitask learners", 2019, table 2): RMSNorm, RoPE and SwiGLU instead of its parts, and an inner width with which
    # the number of parameters is that of GPT-2 within 1 %. Its weights do not fit them.
    "gpt2-124m": _gpt2(12, 768, 2048, 12),
    "gpt2-355m": _gpt2(24, 1024, 2752, 16),
    "gpt2-774m": _gpt2(36, 1280, 3424, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 4288, 25),
    # Small models for laptops and tests. Their vocabularies are the sizes that hlat trains tokenizers to.
    "tiny-1m": _model(4, 128, 344, 4, 4, 1024),
    "tiny-10m": _model(6, 288, 768, 6, 2, 8192),
    "tiny-34m": _model(8, 512, 1536, 8, 4, 8192),
    "tiny-125m": _model(12, 768, 2048, 12, 4, 32000),
}

_COPY = re.compile(r"-(?:hf|base|instruct|chat)$")
# The version of a release that has the numbers of the preset; others differ: see mistral-7b above, and the first
# TinyLlama-1.1B-Chat versions, v0.1 to v0.6, of which some have more tokens.
_VERSIONS = {"mistral-7b": "v0.1", "tinyllama-1.1b": "v1.0"}


def preset_called(name: str) -> str | None:
    """Return the preset that a usual spelling of its name means, such as ``meta-llama/Llama-3.1-8B-Instruct``.

    Owner, capitals, separators and the ending of a converted or fine-tuned copy make no difference. A version does.
    """
    plain = name.lower().replace("_", "-").rpartition("/")[2].removeprefix("meta-")
    spelled = {preset.replace("-", ""): preset for preset in PRESETS}
    spelled |= {(preset + version).replace("-", ""): preset for preset, version in _VERSIONS.items()}
    while (shorter := _COPY.sub("", re.sub(r"-(hf|base|instruct|chat)-(v\d[\d.]*)$", r"-\2", plain))) != plain:
        plain = shorter
    return spelled.get(plain.replace("-", ""))
