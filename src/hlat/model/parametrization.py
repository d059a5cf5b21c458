"""Parametrization: the initial values and rates of every tensor of a model, from one table.

    tensor, model section, optimizer section --scale_of--> Scale: initial value; factors of learning rate and decay
    model section, optimizer section --scale_lines--> the table, for people: a row for all tensors with the same

    tensor                                    initial values                          decay
    matrices, embedding, head                 Normal(0, init_std)                     1
    projections into the residual stream      Normal(0, init_std / sqrt(2 * layers))  1
    norms, biases                             1, 0                                    1 with decay_norms, else 0

The distribution is HLAT's (arXiv 2404.10630 and awslabs/HLAT), the smaller one of projections that of Radford et al.
2019, section 2.3, with ``model.init_scaled_outputs``. The factor of the rate is 1, or the optimizer's own
(``OptimizerConfig.rate_factor``).
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hlat.config import ModelConfig, OptimizerConfig
from hlat.model.architectures import model_spec
from hlat.model.spec import Component, Initial, TensorSpec, axis_size
from hlat.runtime.terminal import listed

_CONSTANTS = {Initial.ONES: 1.0, Initial.ZEROS: 0.0}


@dataclass(frozen=True)
class Scale:
    """Initial values of a tensor, and factors of what the recipe gives for its updates."""

    initial: float  # value of all elements, or standard deviation if they are random
    rate: float = 1.0  # factor of the learning rate
    weight_decay: float = 1.0  # factor of the weight decay; 0 for none
    eps: float = 1.0  # factor of AdamW's epsilon


def scale_of(tensor: TensorSpec, model: ModelConfig, optimizer: OptimizerConfig) -> Scale:
    """Return the row of a tensor."""
    is_decayed = tensor.columns is not None or optimizer.decay_norms
    rate = optimizer.rate_factor(tensor.is_hidden_matrix)
    return Scale(_initial(tensor, model), rate, 1.0 if is_decayed else 0.0)


def _initial(tensor: TensorSpec, model: ModelConfig) -> float:
    if tensor.initial in _CONSTANTS:
        return _CONSTANTS[tensor.initial]
    if tensor.initial is Initial.RESIDUAL and model.init_scaled_outputs:
        return model.init_std / math.sqrt(2 * model.layers)
    return model.init_std


def scale_lines(model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield the lines of the table of a model; tensors of equal sizes and scales share one, whatever their number."""
    spec, names = model_spec(model), defaultdict[tuple[str, ...], list[str]](list)
    head = () if spec.head is None else spec.head.tensors
    for tensor in (*spec.embedding.tensors, *spec.block_tensors, *spec.norm.tensors, *head):
        scale = scale_of(tensor, model, optimizer)
        initial = f"{'std ' if tensor.is_random else ''}{scale.initial:.3g}"
        rates = f"{optimizer.lr * scale.rate:.3g}", f"x {scale.weight_decay:.3g}", f"x {scale.eps:.3g}"
        short = tensor.name.removesuffix(".weight")
        names[*map(str, _fans(tensor, model)), initial, *rates].append(short.partition(".")[2] or short)
    rows = [("fan-in", "fan-out", "initial", "lr", "decay", "eps"), *names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{cells}  {listed(names[row], 2) if row in names else 'of'}"


def _fans(tensor: TensorSpec, model: ModelConfig) -> tuple[int, int]:
    """Return the numbers of inputs and outputs; a vector multiplies or adds to its one input."""
    rows, columns = axis_size(model, tensor.rows), 1 if tensor.columns is None else axis_size(model, tensor.columns)
    # A row of an embedding is what one token, an input, adds to all outputs.
    return (rows, columns) if tensor.component is Component.EMBEDDING else (columns, rows)
