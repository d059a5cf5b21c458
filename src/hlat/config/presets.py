"""Built-in models: their numbers, each with its source in a comment."""

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


_LLAMA3 = {"rope": {"theta": 500000.0}, "norm_eps": 1e-5, "max_sequence_length": 8192}

PRESETS: dict[str, dict[str, Any]] = {
    # HLAT's two models: arXiv 2404.10630 and the configuration files of awslabs/HLAT.
    "llama-2-7b": _model(32, 4096, 11008, 32, 32, 32000, max_sequence_length=4096),
    "llama-2-70b": _model(80, 8192, 28672, 64, 8, 32000, max_sequence_length=4096),
    # "The Llama 3 herd of models", arXiv 2407.21783, table 3; published config.json files.
    "llama-3-8b": _model(32, 4096, 14336, 32, 8, 128256, **_LLAMA3),
    "llama-3-70b": _model(80, 8192, 28672, 64, 8, 128256, **_LLAMA3),
    "llama-3-405b": _model(
        126,
        16384,
        53248,
        128,
        8,
        128256,
        max_sequence_length=131072,
        rope={"theta": 500000.0, "scaling": _LLAMA31_SCALING},
    ),
    # Small models for laptops and tests. Their vocabularies are the sizes that hlat trains tokenizers to.
    "tiny-1m": _model(4, 128, 344, 4, 4, 1024),
    "tiny-10m": _model(6, 288, 768, 6, 2, 8192),
    "tiny-34m": _model(8, 512, 1536, 8, 4, 8192),
    "tiny-125m": _model(12, 768, 2048, 12, 4, 32000),
}
