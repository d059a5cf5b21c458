"""A small model of every supported family, and the same model with the same weights in transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, build
from hlat.model.document_attention import DocumentMask
from hlat.model.hf.config import config_json, hf_class
from hlat.model.hf.packing import Packed, pack, packed_tensors
from tests.support.model.canonical import from_canonical, to_canonical

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "layers": 3,
    "hidden_size": 64,
    "intermediate_size": 176,
    "heads": 4,
    "max_sequence_length": 256,
    "norm_eps": 1e-5,
    # large enough that attention is far from uniform, so that a wrong sign or angle changes results
    "init_std": 0.15,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 64, "mscale": 1.5, "mscale_all_dim": 0.7}
GPT_OSS_YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 64, "truncate": False}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2-mha": {},
    "llama31-gqa": {"kv_heads": 2, "rope": {"theta": 500000.0, "scaling": LLAMA3}},
    "yarn-gqa": {"kv_heads": 2, "rope": {"scaling": YARN}},
    "linear-mqa": {"kv_heads": 1, "rope": {"scaling": {"kind": "linear", "factor": 4.0}}},
    "tied": {"kv_heads": 2, "tie_embeddings": True},
    "mistral-window": {"architecture": "mistral", "kv_heads": 2, "head_dim": 24, "sliding_window": 9},
    "mistral-no-window": {"architecture": "mistral", "kv_heads": 1, "tie_embeddings": True},
    "olmo2-gqa": {"architecture": "olmo2", "kv_heads": 2, "norm_eps": 1e-6, "rope": {"theta": 500000.0}},
    "olmo2-mha": {"architecture": "olmo2", "head_dim": 24},
    "gemma2": {
        "architecture": "gemma2",
        "layers": 4,
        "kv_heads": 2,
        "query_pre_attn_scalar": 9,
        "sliding_window": 9,
        "layer_types": [SLIDING, FULL],
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "norm_eps": 1e-6,
    },
    "gemma3": {
        "architecture": "gemma3_text",
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": [SLIDING, SLIDING, FULL],
        "rope": {"theta": 1e6, "scaling": {"kind": "linear", "factor": 4.0}},
        "local_rope": {"theta": 10000.0},
        "norm_eps": 1e-6,
    },
    "gemma3-scaled": {
        "architecture": "gemma3_text",
        "hidden_size": 72,
        "kv_heads": 1,
        "query_pre_attn_scalar": 40,
        "rope": {"theta": 1e6},
        "sliding_window": 12,
    },
    "olmo3": {
        "architecture": "olmo3",
        "layers": 5,
        "kv_heads": 2,
        "sliding_window": 9,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rope": {"theta": 500000.0, "scaling": {"kind": "linear", "factor": 4.0}},
        "local_rope": {"theta": 500000.0},
    },
    "ministral": {
        "architecture": "ministral",
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 24,
        "sliding_window": 9,
        "layer_types": [FULL, SLIDING],
    },
    "smollm3": {
        "architecture": "smollm3",
        "layers": 5,
        "kv_heads": 2,
        "rope": {"theta": 2e6},
        "rope_layers": [True, True, True, False],
        "tie_embeddings": True,
    },
    "phi3": {
        "architecture": "phi3",
        "kv_heads": 2,
        "head_dim": 24,
        "rope": {"partial_rotary_factor": 0.75},
        "sliding_window": 9,
    },
    "gpt-oss": {
        "architecture": "gpt_oss",
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 24,
        "rope": {"theta": 150000.0, "scaling": GPT_OSS_YARN},
        "sliding_window": 9,
        "layer_types": [SLIDING, FULL],
    },
    "qwen2-bias": {"architecture": "qwen2", "kv_heads": 2, "rope": {"theta": 1e6}, "norm_eps": 1e-6},
    "qwen3-norm": {"architecture": "qwen3", "kv_heads": 2, "head_dim": 24, "rope": {"theta": 1e6}, "norm_eps": 1e-6},
    "qwen3-norm-bias-tied": {
        "architecture": "qwen3",
        "kv_heads": 2,
        "qkv_bias": True,
        "head_dim": 32,
        "tie_embeddings": True,
    },
}

WITHOUT_STEP = {"gemma2", "gemma3", "gemma3-scaled", "gpt-oss", "olmo3", "ministral", "phi3", "smollm3"}
"""Families that the compiled decoding step does not compute."""


def config_of(family: str, **more: Any) -> ModelConfig:
    """Model section of a family's small model."""
    return ModelConfig.model_validate({**BASE, **FAMILIES[family], **more})


def our_model(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 1) -> Decoder:
    """Build hlat's model, with norms different from one and biases from zero, so that they matter. Values are fp32."""
    model = build(config, device="cpu", seed=seed)
    canonical = to_canonical(config, dict(model.named_parameters()))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for name, tensor in canonical.items():
            if tensor.ndim == 1:
                canonical[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    load(model, canonical)
    return model.to(dtype)


def load(model: Decoder, canonical: dict[str, torch.Tensor]) -> None:
    """Load canonical weights into a model."""
    model.load_state_dict(from_canonical(model.config, canonical))


def implementations_of(config: ModelConfig) -> dict[str, str]:
    """Return the implementations in transformers that alter softmax if a model does, and have experts in float64."""
    experts = {"experts_implementation": "eager"} if config.architecture == "gpt_oss" else {}
    return {"attn_implementation": "eager" if config.alters_softmax else "sdpa", **experts}


def twin(model: Decoder, dtype: torch.dtype) -> nn.Module:
    """Build the same model in transformers, from the exported config.json and with the same weights."""
    import transformers  # noqa: PLC0415  (slow to import, and an extra)

    config = model.config
    content = config_json(config, torch.float32, eos_id=None, bos_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**content), dtype=torch.float32, **implementations_of(config)
    )
    weights = {name: t.detach().float() for name, t in to_canonical(config, dict(model.named_parameters())).items()}
    missing, unexpected = theirs.load_state_dict(dict(pack(packed_of(config), weights.items())), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    return theirs.to(dtype).eval()


def packed_of(config: ModelConfig) -> tuple[Packed, ...]:
    """Return the tensors that transformers has otherwise than hlat."""
    return packed_tensors(hf_class(config).model_type, config.options)


@contextmanager
def float64_norms(theirs: nn.Module) -> Iterator[None]:
    """Keep transformers' RMSNorm and softmax, which cast to fp32, in float64 while it is the reference."""
    norms = {type(module) for module in theirs.modules() if type(module).__name__.endswith("RMSNorm")}
    saved = {cls: cls.forward for cls in norms}

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        is_gemma = type(self).__name__.startswith("Gemma")
        weight, eps = (1.0 + self.weight, self.eps) if is_gemma else (self.weight, self.variance_epsilon)
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    for cls in norms:
        cls.forward = forward
    softmax = nn.functional.softmax
    nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim)
    try:
        yield
    finally:
        nn.functional.softmax = softmax
        for cls, original in saved.items():
            cls.forward = original


def tokens_of(config: ModelConfig, batch: int = 2, length: int = 48) -> torch.Tensor:
    """Random tokens, the same at every call."""
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def mask_of(config: ModelConfig, x_BSD: torch.Tensor) -> DocumentMask | None:
    """Return the mask that the decoder gives blocks with another softmax; None for all others."""
    if not config.alters_softmax:
        return None
    batch, length = x_BSD.shape[:2]
    return DocumentMask.from_positions(torch.arange(length).expand(batch, -1), ((0, length),))
