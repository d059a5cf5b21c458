"""Small models with every kind of block, in every precision mode, that recompute given steps."""

from typing import Any

import pytest
import torch

from hlat.activation_checkpointing import checkpoint_activations
from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, build
from hlat.precision import MODES
from tests.support.storages import Allocated

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "layers": 2,
    "hidden_size": 48,
    "intermediate_size": 112,
    "heads": 4,
    "kv_heads": 2,
    "init_std": 0.15,
}
KINDS: dict[str, dict[str, Any]] = {
    "coalesced": {},
    "separate": {"coalesce": False},
    "many heads, biases": {"kv_heads": 4, "qkv_bias": True},
    "sliding window": {"architecture": "mistral", "sliding_window": 9, "head_dim": 16},
    "layers differ": {
        "architecture": "olmo3",
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "local_rope": {"theta": 100.0},
    },
    "a layer without positions": {"architecture": "smollm3", "rope_layers": [True, False]},
    "a layer without positions, separate": {"architecture": "smollm3", "rope_layers": [False], "coalesce": False},
    "capped scores and logits": {
        "architecture": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "sinks and biases": {
        "architecture": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "sinks and biases, separate": {"architecture": "gpt_oss", "coalesce": False, "tie_embeddings": True},
    "a part of each head is rotated": {"architecture": "phi3", "rope": {"partial_rotary_factor": 0.5}},
    "norms before and after": {
        "architecture": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "norms before and after, separate": {"architecture": "gemma3_text", "coalesce": False, "tie_embeddings": True},
    "norms after": {"architecture": "olmo2", "head_dim": 16},
    "norms after, separate": {"architecture": "olmo2", "coalesce": False, "tie_embeddings": True},
    "normed queries and keys": {"qk_norm": True, "head_dim": 16},
    "normed queries and keys, separate": {"qk_norm": True, "coalesce": False, "tie_embeddings": True},
}
MODES_TESTED = ("fp32", "mixed", "bf16-sr")
# Every kind in one mode and every mode of one kind by default; all pairs in the slow suite.
KINDS_IN_MODES = [
    pytest.param(kind, mode, marks=() if kind == "coalesced" or mode == "mixed" else pytest.mark.slow)
    for kind in KINDS
    for mode in MODES_TESTED
]
BATCH, LENGTH = 2, 40


def config_of(kind: str, **more: Any) -> ModelConfig:
    """Model section of a kind."""
    return ModelConfig.model_validate({**BASE, **KINDS[kind], **more})


def tokens() -> torch.Tensor:
    """(B, S) token ids."""
    return torch.randint(0, BASE["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def model_of(config: ModelConfig, mode: str, recomputed: list[frozenset[str]]) -> Decoder:
    """Build a model whose blocks recompute the listed steps, with norm weights other than one and biases than zero."""
    torch.set_num_threads(1)
    model = build(config, device="cpu", seed=2, dtype=MODES[mode].weights)
    model.compute = MODES[mode].compute
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    checkpoint_activations(model, ActivationPlan("as listed", tuple(recomputed), 0, 1, 0))
    return model


def document_positions() -> torch.Tensor:
    """Positions (B, S) of tokens within documents: three in the first row, one of a single token; one in other rows."""
    several = torch.cat([torch.arange(length) for length in (LENGTH - 12, 1, 11)])
    return torch.stack([several, *[torch.arange(LENGTH)] * (BATCH - 1)])


def trained(model: Decoder, positions: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Compute the loss and all gradients of one forward and backward pass."""
    ids = tokens()
    loss = model(ids, ids.roll(1), positions=positions)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def kept(model: Decoder, positions: torch.Tensor | None = None) -> int:
    """Count the bytes that a forward pass keeps alive for backward, token ids included."""
    ids = tokens()
    model(ids[:, :2])  # creates the rotation tables
    with Allocated() as allocated:
        loss = model(ids, ids, positions=positions)
    tables = [table for rope in model.ropes.values() for table in rope.tables(((0, 1),), ids.device)]
    return allocated.alive([loss, ids, *tables, *model.parameters()]) + ids.nbytes
