"""Parametrization: the initial values and rates of every tensor of a model, from one table.

    tensor, model section, optimizer section --scale_of--> Scale: initial value; factors of learning rate and decay
    model section, optimizer section --scale_lines--> the table, for people: a row for all tensors with the same

    m = hidden_size / base_hidden_size, l = layers / base_layers; 1 where ``optimizer.transfer`` has no such base

    tensor             initial values                rate         decay    epsilon    multiplier
    embedding          Normal(0, init_std)           1            1        1 / m      1
    head               Normal(0, init_std)           1            1        1 / m      1 / m
    final norm         1                             1            0        1 / m      1, or 1 / m for a tied head
    norms, biases      1, 0                          1            0        1 / (m l)  1
    hidden matrices    Normal(0, init_std / sqrt(m)) 1 / m        m        1 / (m l)  1
      with Muon        the same                      1 / sqrt(m)  sqrt(m)
    what is added to the residual stream, in addition                                 1 / l

AdamW's rows for widths are Yang and Hu 2022 (arXiv 2203.03466), table 8, with the decay that keeps rate * decay; those
for depths Dey et al. 2025 (arXiv 2505.01618, CompleteP), table 1. Muon: the spectral norm of an update has to stay that
of the weights (Yang, Simon and Bernstein 2023, arXiv 2310.17813), and Moonlight's update has sqrt(m) times the base's.
Projections into the residual stream begin at 1 / sqrt(2 * layers / l) of that with ``model.init_scaled_outputs``
(Radford et al. 2019, section 2.3, as in HLAT, arXiv 2404.10630); ``optimizer.decay_norms`` makes the zeros ones.

Attention logits are q k / sqrt(head_dim), and with ``base_head_dim`` q k sqrt(base_head_dim) / head_dim: a multiplier
c = (base_head_dim / head_dim)^(1/4) of the norms of queries and keys, or of q, k and v, with 1 / c of the output.

A multiplier is no operation of the model, so that kernels, layouts and exported models know nothing of it: W' = a W is
stored, which trains the same way with a times the initial values and the rate, and decay and epsilon divided by a. Only
the norm of the gradient changes; ``ParallelModel.reduce_loss_and_norm`` takes that by W.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hlat.config import ModelConfig, OptimizerConfig, Problem, RecipeError
from hlat.model.architectures import model_spec
from hlat.model.spec import Axis, Component, Initial, ModelSpec, TensorSpec, axis_size
from hlat.runtime.terminal import aligned, listed

_CONSTANTS = {Initial.ONES: 1.0, Initial.ZEROS: 0.0}


@dataclass(frozen=True)
class Scale:
    """Initial values of a tensor, and factors of what the recipe gives for its updates; the multiplier is in them."""

    initial: float  # value of all elements, or standard deviation if they are random
    rate: float  # factor of the learning rate
    weight_decay: float  # factor of the weight decay; 0 for none
    eps: float  # factor of AdamW's epsilon
    multiplier: float


def scale_of(tensor: TensorSpec, model: ModelConfig, optimizer: OptimizerConfig) -> Scale:
    """Return the row of a tensor; RecipeError if it cannot have the multiplier that ``optimizer.transfer`` asks for."""
    width, depth, head = optimizer.growth(model.hidden_size, model.layers, model.n_head_dim)
    spec, is_hidden = model_spec(model), tensor.is_hidden_matrix
    multiplier = _multiplier(tensor, spec, width, depth) * _attention_multiplier(tensor, spec, head**-0.25)
    # A norm of weight w + 1 is not multiplied by multiplying w.
    if multiplier != 1 and tensor.component is Component.NORMS and tensor.initial is Initial.ZEROS:
        reason = f"{tensor.name} of the architecture {model.architecture} cannot be multiplied."
        raise RecipeError([Problem("optimizer.transfer", reason, "Use none, or another architecture.")])
    rate = optimizer.rate_factor(is_hidden, width)
    # Rate times decay stays that of the base.
    decay = optimizer.rate_factor(is_hidden) / rate if tensor.columns is not None or optimizer.decay_norms else 0.0
    eps = 1.0 / (width * (depth if tensor in spec.block_tensors else 1.0))
    initial = _initial(tensor, model, depth) / (math.sqrt(width) if is_hidden else 1.0)
    return Scale(initial * multiplier, rate * multiplier, decay / multiplier, eps / multiplier, multiplier)


def _initial(tensor: TensorSpec, model: ModelConfig, depth: float) -> float:
    if tensor.initial in _CONSTANTS:
        return _CONSTANTS[tensor.initial]
    if tensor.initial is Initial.RESIDUAL and model.init_scaled_outputs:
        return model.init_std / math.sqrt(2 * model.layers / depth)
    return model.init_std


def _multiplier(tensor: TensorSpec, spec: ModelSpec, width: float, depth: float) -> float:
    # The head reads the output of the final norm, and a tied matrix is an embedding, too.
    before_logits = spec.norm if spec.head is None else spec.head
    if tensor in before_logits.tensors:
        return 1.0 / width
    return 1.0 / depth if tensor.is_added else 1.0


def _attention_multiplier(tensor: TensorSpec, spec: ModelSpec, root: float) -> float:
    # The same for q, k and v, which may be one parameter and then have one rate.
    heads, norms = (Axis.HEAD, Axis.QUERIES, Axis.KEYS), Component.NORMS
    if any(each.component is norms and each.rows in heads for each in spec.block_tensors):
        return root if tensor.component is norms and tensor.rows in heads else 1.0
    if tensor.columns is Axis.QUERIES:
        return 1.0 / root
    return root if tensor.rows in heads else 1.0


def scale_lines(model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield the lines of the table of a model; tensors of equal sizes and scales share one, whatever their number."""
    spec, names = model_spec(model), defaultdict[tuple[str, ...], list[str]](list)
    head = () if spec.head is None else spec.head.tensors
    for tensor in (*spec.embedding.tensors, *spec.block_tensors, *spec.norm.tensors, *head):
        scale = scale_of(tensor, model, optimizer)
        initial = f"{'std ' if tensor.is_random else ''}{scale.initial:.3g}"
        factors = [f"x {factor:.3g}" for factor in (scale.weight_decay, scale.eps, scale.multiplier)]
        short = tensor.name.removesuffix(".weight")
        names[*map(str, _fans(tensor, model)), initial, f"{optimizer.lr * scale.rate:.3g}", *factors].append(
            short.partition(".")[2] or short
        )
    heads = ("fan-in", "fan-out", "initial", "lr", "decay", "eps", "multiplier", "of")
    yield from aligned([heads, *((*cells, listed(tensors, 2)) for cells, tensors in names.items())])


def _fans(tensor: TensorSpec, model: ModelConfig) -> tuple[int, int]:
    """Return the numbers of inputs and outputs; a vector multiplies or adds to its one input."""
    rows, columns = axis_size(model, tensor.rows), 1 if tensor.columns is None else axis_size(model, tensor.columns)
    # A row of an embedding is what one token, an input, adds to all outputs.
    return (rows, columns) if tensor.component is Component.EMBEDDING else (columns, rows)
