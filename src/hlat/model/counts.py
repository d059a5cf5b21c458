"""Parameter counts and FLOPs per token.

    model section --spec--> parameters by component --> FLOPs per token, of a forward pass and of training

Reported MFU, memory plans and time predictions all use these functions. Notation: L layers, D hidden size, I
intermediate size, H query heads, K kv heads, E head width, V vocabulary, S sequence length.

Training FLOPs per token, forward and backward (Kaplan et al. 2020; PaLM, Chowdhery et al. 2022, appendix B): every
weight of a matrix product costs 2 FLOPs forward and 4 backward, and so does every product of attention:

    full    6 N + 12 L H E S            each token attends to all S positions, as PaLM and most MFU figures count
    causal  6 N + 12 L H E (S + 1) / 2  each token attends to itself and those before: the work that is necessary

In layers with a sliding window of W < S tokens, S is W in the first line, and (S + 1) / 2 is W - W (W - 1) / (2 S) in
the second.

N counts the weights of matrix products. It includes the head, also if tied, but not the embedding lookup.
Recomputation is never counted: these are the FLOPs of the model, not of an implementation.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hlat.config import ModelConfig
from hlat.model.architectures import model_spec
from hlat.model.spec import FULL_MODEL, Component, element_share, local_elements

Convention = Literal["causal", "full"]


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters by component."""

    embedding: int
    attention: int  # q, k, v and output projections with their biases
    feed_forward: int
    norms: int  # all norms, including q and k norms
    head: int  # 0 if tied to the embedding
    matmul: int  # weights of matrix products, including the head also if tied: the N of the FLOP formulas

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a complete model by component, and those of matrix products."""
    spec, counts, matmul = model_spec(config), dict.fromkeys(Component, 0), 0
    ends = [spec.embedding, spec.norm, *([] if spec.head is None else [spec.head])]
    counted = [(tensor, config.layers) for tensor in spec.block_tensors]
    counted += [(tensor, 1) for parameter in ends for tensor in parameter.tensors]
    for tensor, times in counted:
        elements = times * local_elements(config, FULL_MODEL, tensor)
        counts[tensor.component] += elements
        matmul += elements * tensor.is_product
    # The product of a tied head is computed all the same
    if spec.head is None:
        matmul += counts[Component.EMBEDDING]
    return ParameterCount(
        embedding=counts[Component.EMBEDDING],
        attention=counts[Component.ATTENTION],
        feed_forward=counts[Component.FEED_FORWARD],
        norms=counts[Component.NORMS],
        head=counts[Component.HEAD],
        matmul=matmul,
    )


@lru_cache(maxsize=256)
def block_share(config: ModelConfig, tensor_count: int) -> float:
    """Count the parameters of one block per tensor rank, as a mean over the ranks."""
    return sum(element_share(config, tensor, tensor_count) for tensor in model_spec(config).block_tensors)


@lru_cache(maxsize=256)
def hidden_share(config: ModelConfig, tensor_count: int) -> float:
    """Count the elements of the hidden matrices of one block per tensor rank, as a mean over the ranks."""
    tensors = (tensor for tensor in model_spec(config).block_tensors if tensor.is_hidden_matrix)
    return sum(element_share(config, tensor, tensor_count) for tensor in tensors)


def attended_positions(config: ModelConfig, sequence_length: int, convention: Convention = "causal") -> float:
    """Return how many positions a token attends to, averaged over a sequence and all layers.

    ValueError: unknown convention.
    """
    if convention not in ("causal", "full"):
        raise ValueError(f"unknown FLOP convention {convention!r}; use 'causal' or 'full'")
    total = 0.0
    for window, layers in Counter(config.windows(sequence_length)).items():
        attended = sequence_length if window is None else window
        # The first tokens attend to those before, the others to a complete window.
        mean = attended * (1 - (attended - 1) / (2 * sequence_length))
        total += layers * (mean if convention == "causal" else attended)
    return total / config.layers


def effective_window(config: ModelConfig, sequence_length: int) -> float:
    """Return the window with which, in all layers, attention would cost the same; infinity for none."""
    windows = Counter(config.windows(sequence_length))
    if len(windows) == 1:
        return next(iter(windows)) or math.inf
    # A window W of S positions costs W (2 - W / S): twice the mean number of positions, without the diagonal.
    wide = {window: window or sequence_length for window in windows}
    cost = sum(layers * wide[window] * (2 - wide[window] / sequence_length) for window, layers in windows.items())
    return sequence_length * (1 - math.sqrt(1 - cost / (config.layers * sequence_length)))


def forward_flops_per_token(config: ModelConfig, sequence_length: int, convention: Convention = "causal") -> float:
    """Count the FLOPs of the forward pass per token, averaged over a sequence of ``sequence_length`` tokens."""
    attended = attended_positions(config, sequence_length, convention)
    per_position = 4 * config.layers * config.heads * config.n_head_dim  # one row of Q K^T and one of P V
    return 2 * count_parameters(config).matmul + per_position * attended


def flops_per_token(config: ModelConfig, sequence_length: int, convention: Convention = "causal") -> float:
    """Count the FLOPs of training per token, forward and backward; ValueError: unknown convention."""
    # Backward costs twice as much as forward: a product by the input and one by the weight.
    return 3 * forward_flops_per_token(config, sequence_length, convention)
