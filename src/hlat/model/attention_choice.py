"""The kernel of attention that a recipe gets on a device: what runs record, rehearsals simulate and plans price.

model, dtype, layout -> attention_heads -> AttentionHeads --attention_kernel--> AttentionKernel (``runtime.backend``)
"""

from dataclasses import replace

import torch

from hlat.config import Recipe
from hlat.config.sections import ModelConfig
from hlat.model.kernels import describe_attention, has_attention
from hlat.precision import MODES
from hlat.runtime.backend import AttentionHeads, AttentionKernel, backend_of


def attention_heads(
    model: ModelConfig, mode: str, sequence: int, *, isolate: bool = False, tensor: int = 1, context: int = 1
) -> AttentionHeads:
    """Describe the heads of one rank.

    Args:
        model: the model.
        mode: precision mode, one of ``MODES``.
        sequence: tokens of a sequence.
        isolate: ``data.isolate``.
        tensor: tensor-parallel degree.
        context: context-parallel degree.
    """
    # A kv head is never split: with fewer of them than tensor ranks, each rank has one.
    grouped = model.heads // tensor > max(1, model.n_kv_heads // tensor)
    limited = isolate or model.window(sequence) is not None
    return AttentionHeads(MODES[mode].compute, model.n_head_dim, grouped, limited, context > 1)


def recipe_heads(recipe: Recipe) -> AttentionHeads:
    """Describe the heads of one rank of a recipe with a resolved precision mode."""
    data, layout = recipe.data, recipe.parallel
    return attention_heads(
        recipe.model,
        recipe.precision.mode,
        data.sequence_length,
        isolate=data.isolate,
        tensor=layout.tensor,
        context=layout.context,
    )


def attention_kernel(heads: AttentionHeads, deterministic: bool, device: torch.device) -> AttentionKernel:
    """Return the kernel of attention in training: hlat's own where it is compiled, else that of the backend.

    Computations by a kernel of the same name have the same bits, as far as hlat decides.

    Args:
        heads: heads of one rank.
        deterministic: ``run.deterministic`` of the recipe.
        device: the device, which may be simulated.
    """
    if has_attention(device.type, heads.dtype, heads.head_dim):
        return AttentionKernel(describe_attention() + " within documents" * heads.limited)
    backend = backend_of(device)
    kernel = backend.attention_kernel(heads, deterministic, device)
    widened = backend.product_dtype(heads.dtype) != heads.dtype  # where bf16 would be emulated
    return replace(kernel, name=f"{kernel.name}, in fp32") if widened else kernel


def deterministic_by_default(recipe: Recipe, device: torch.device) -> bool:
    """Return the value of ``run.deterministic=auto``: False where it takes a slower kernel of attention.

    Args:
        recipe: recipe with a resolved precision mode.
        device: the device, which may be simulated.
    """
    return backend_of(device).deterministic_by_default(recipe_heads(recipe), device)
