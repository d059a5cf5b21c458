"""Logits and the gradient of every parameter equal those of transformers, for every model family, fused or not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hlat.config.sections.model import ModelConfig
from hlat.model.hf.packing import sources
from hlat.model.parameter_layout import canonical_shapes
from tests.support.model.canonical import to_canonical
from tests.support.model.families import FAMILIES, config_of, float64_norms, our_model, packed_of, tokens_of, twin

pytest.importorskip("transformers", reason="the extra [hf] is not installed")
CASES = [(family, coalesce) for family in FAMILIES for coalesce in (True, False)]


def ours(config: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and canonical gradients of the next-token loss."""
    model = our_model(config, dtype)
    logits = model(tokens_of(config))
    _loss(logits, config).backward()
    return logits.detach(), to_canonical(config, {name: p.grad for name, p in model.named_parameters()})


def theirs(config: ModelConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same from transformers, in float64 throughout."""
    reference: nn.Module = twin(our_model(config), torch.float64)
    with float64_norms(reference):
        logits = reference(tokens_of(config), use_cache=False).logits
    _loss(logits, config).backward()
    grads = {name: p.grad for name, p in reference.named_parameters()}
    # Without those of tensors that have no effect, and of zero biases, which hlat's models do not have
    taken = sources(packed_of(config), canonical_shapes(config)).items()
    return logits.detach(), {name: grads[at] if take is None else take(grads[at]) for name, (at, take) in taken}


def _loss(logits: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_of(config)[:, 1:].flatten())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of the reference."""
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize(("family", "coalesce"), CASES)
def test_float64_agrees_to_1e_9(family: str, coalesce: bool) -> None:
    config = config_of(family, coalesce=coalesce)
    logits, grads = ours(config, torch.float64)
    expected_logits, expected_grads = theirs(config)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9 * float(expected_logits.abs().max()))
    assert grads.keys() == expected_grads.keys()
    assert max(distance(grads[name], expected_grads[name]) for name in grads) < 1e-9


def longest_path(config: ModelConfig, length: int) -> float:
    """Roundings along the longest path through the model, in units of u, where a sum of n products counts sqrt(n).

    A dot product of n terms has an error of about sqrt(n) u relative to its size (Higham and Mary 2019: n u at worst,
    sqrt(n) u where the errors are independent). A block has the products of q/k/v (n = D), scores (E), values (S),
    output (H E), gate/up (D) and down (I), and 16 pointwise roundings: two norms of 4, rotation 3, softmax 3, silu and
    its product 2. The errors of a path are added, not averaged, and the residual stream, which carries most of the
    signal past each block unchanged, is not taken into account: that compensates for amplification inside a block.
    """
    head_dim = config.n_head_dim
    products = [config.hidden_size, head_dim, length, config.heads * head_dim, config.hidden_size]
    block = sum(map(math.sqrt, [*products, config.intermediate_size])) + 16
    return config.layers * block + math.sqrt(config.hidden_size)


@pytest.mark.parametrize(("family", "coalesce"), CASES)
def test_float32_error_is_explained_by_rounding(family: str, coalesce: bool) -> None:
    config = config_of(family, coalesce=coalesce)
    logits, grads = ours(config, torch.float32)
    expected_logits, expected_grads = theirs(config)
    batch, length = tokens_of(config).shape
    path, u = longest_path(config, length), 2.0**-24
    assert distance(logits, expected_logits) < path * u
    # Backward follows the path a second time and sums the gradient of a weight over all tokens.
    bound = (2 * path + math.sqrt(batch * length)) * u
    assert max(distance(grads[name], expected_grads[name]) for name in grads) < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_error_is_explained_by_rounding(family: str) -> None:
    """Count the roundings: matrix products accumulate in fp32, so each tensor is rounded once, by at most 2^-9.

    There are 13 roundings on the path of a block (two norms, q/k/v, rotation, softmax, values, output, gate/up, silu,
    product, down, two sums), one of its weights, and three for the embedding, the final norm and the logits.
    """
    config = config_of(family)
    model = our_model(config)
    model.compute = torch.bfloat16
    logits = model(tokens_of(config))
    expected_logits, _ = theirs(config)
    assert logits.dtype == torch.bfloat16
    assert distance(logits.detach(), expected_logits) < (14 * config.layers + 3) * 2.0**-9
    _loss(logits.float(), config).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
