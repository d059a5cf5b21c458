"""Seconds that a device computes: one layer, forward and backward, and the ends of the model.

    columns, constants -> products + attention + pointwise operations + gaps between kernels -> ComputeTimes

A product of M x K and K x N takes its FLOPs at the rate that large products sustain, longer where its tiles do not
fill the device or its sides are not aligned, and a share of its memory traffic besides: relative to the FLOPs that is
(peak / bandwidth) (1/M + 1/N + 1/K), so that small products are slow in proportion to the balance of the chip.

Backward costs two products for each of forward (by the input, by the weight); flash attention's backward computes
its scores again, 5 products for 2. Notation as in model/derived/counts.py; T tokens of a micro-batch on a rank.
"""

from dataclasses import dataclass

import numpy as np

from hlat.planner.cost.constants import Constants
from hlat.planner.problem import (
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    MATERIALIZED_SCORES,
    Column,
    WorkloadColumns,
    layer_weights,
)

_TILE = 128  # rows and columns of a tile, in the libraries of all makers about this many
_ALIGNED = 64  # elements
_KERNELS = (
    30,
    24,
)  # of a layer's forward pass, copies and the start of collectives included: materialised attention, flash
_BACKWARD_KERNELS = 1.7  # as many again per kernel of forward
_POINTWISE_BACKWARD = 1.5  # bytes, per byte of forward


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds on a rank for one micro-batch; of a layer unless said otherwise.

    Attributes:
        forward, backward: without any traffic and without what the host costs.
        products, attention, pointwise, gaps: what they consist of, forward and backward together.
        attention_forward, attention_backward: the attention core alone.
        host_forward, host_backward: that the host takes to start the kernels of a pass.
        head: of the output projection and the loss, forward and backward.
        weight: of backward, what makes the gradients of weights.
        last: of forward, the block's last product.
    """

    forward: Column
    backward: Column
    products: Column
    attention: Column
    pointwise: Column
    gaps: Column
    attention_forward: Column
    attention_backward: Column
    host_forward: Column
    host_backward: Column
    head: Column
    weight: Column
    last: Column


def compute_times(columns: WorkloadColumns, constants: Constants) -> ComputeTimes:
    """What the device of the slowest rank computes."""
    product = _Products.of(columns, constants)
    forward_products, input_products, weight_products = _layer_products(columns, constants, product)
    backward_products = input_products + weight_products
    attention_forward, attention_backward = _attention(columns, constants, product)
    pointwise = _pointwise(columns, constants)
    inner = columns.inner / columns.tensor
    kernels = np.where(columns.attention == MATERIALIZED_SCORES, _KERNELS[0], _KERNELS[1])
    gaps = kernels * constants.of("kernel", columns)
    host = kernels * constants.of("host", columns) * columns.eager
    return ComputeTimes(
        forward=forward_products + attention_forward + pointwise + gaps,
        backward=backward_products + attention_backward + _POINTWISE_BACKWARD * pointwise + _BACKWARD_KERNELS * gaps,
        products=forward_products + backward_products,
        attention=attention_forward + attention_backward,
        pointwise=(1 + _POINTWISE_BACKWARD) * pointwise,
        gaps=(1 + _BACKWARD_KERNELS) * gaps,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
        host_forward=host,
        host_backward=_BACKWARD_KERNELS * host,
        head=_head(columns, constants, product),
        weight=weight_products,
        last=product.seconds(columns.tokens, columns.hidden, inner, in_blocks=True),
    )


@dataclass(frozen=True)
class _Products:
    """Seconds of matrix products."""

    columns: WorkloadColumns
    rate: Column  # FLOP/s that large ones sustain, in 16 bits
    rate_in_blocks: Column  # in the precision of blocks
    unhidden: Column
    misaligned: Column

    @classmethod
    def of(cls, columns: WorkloadColumns, constants: Constants) -> "_Products":
        sustained = constants.of("products", columns)
        rate = columns.peak * columns.reached * sustained
        eight = columns.peak_eight_bit * columns.reached_eight_bit * sustained * constants.of("eight_bit", columns)
        in_blocks = np.where(columns.eight_bit > 0, eight, rate)
        unhidden = constants.of("unhidden", columns)
        return cls(columns, rate, in_blocks, unhidden, constants.of("misaligned", columns))

    def seconds(
        self, m: Column, n: Column, k: Column, *, in_blocks: bool = False, count: Column | float = 1.0
    ) -> Column:
        """Of ``count`` products m x k by k x n together; ``in_blocks``, in the precision of blocks."""
        rate = self.rate_in_blocks if in_blocks else self.rate
        operand = np.where(self.columns.eight_bit > 0, 1.0, 2.0) if in_blocks else 2.0
        tiles_m, tiles_n = np.ceil(m / _TILE), np.ceil(n / _TILE)
        padding = tiles_m * _TILE / m * tiles_n * _TILE / n
        filled = np.maximum(1.0, self.columns.units / (count * tiles_m * tiles_n))
        sides = sum((side % _ALIGNED > 0).astype(np.float64) for side in (m, n, k))
        arithmetic = 2 * count * m * n * k / rate * padding * filled * (1 + self.misaligned * sides)
        traffic = count * (2.0 * m * n + operand * (m * k + n * k))
        seconds: Column = arithmetic + self.unhidden * traffic / self.columns.memory_rate
        return seconds

    def all_three(self, m: Column, n: Column, k: Column, *, in_blocks: bool = False) -> tuple[Column, Column, Column]:
        """Forward (m x k by k x n), and backward: by the input (m x n by n x k) and by the weight (n x m by m x k)."""
        return (
            self.seconds(m, n, k, in_blocks=in_blocks),
            self.seconds(m, k, n, in_blocks=in_blocks),
            self.seconds(k, n, m, in_blocks=in_blocks),
        )


def _layer_products(
    columns: WorkloadColumns, constants: Constants, product: _Products
) -> tuple[Column, Column, Column]:
    """Forward, backward by the inputs and backward by the weights."""
    tokens, width = columns.tokens, columns.hidden
    queries, keys = columns.heads * columns.head_dim, columns.kv_heads * columns.head_dim
    inner = columns.inner / columns.tensor
    # Heads that there are fewer of than ranks are copied to each.
    keys_here = np.maximum(keys / columns.tensor, columns.head_dim)
    shapes = (
        (tokens, queries / columns.tensor + 2 * keys_here, width),
        (tokens, width, queries / columns.tensor),
        (tokens, inner * (1 + columns.gated), width),
        (tokens, width, inner),
    )
    forward, by_input, by_weight = (
        sum(times) for times in zip(*(product.all_three(m, n, k, in_blocks=True) for m, n, k in shapes), strict=True)
    )
    pointwise_rate = columns.memory_rate * constants.of("memory", columns)
    casts = sum(3 * m * k for m, _, k in shapes) / pointwise_rate * constants.of("casts", columns)
    casts = np.where(columns.eight_bit > 0, casts, 0.0)
    # Gradients of weights are added to those of earlier micro-batches: read and written, in fp32.
    # The product itself does that at its end.
    added = product.unhidden * np.where(columns.zero < 3, 8 * layer_weights(columns) / columns.memory_rate, 0.0)
    return forward + casts, by_input + 2 * casts, by_weight + added


def _attention(columns: WorkloadColumns, constants: Constants, product: _Products) -> tuple[Column, Column]:
    """The core: scores and their product with values, and what is between."""
    length, head = columns.sequence, columns.head_dim
    heads = columns.heads / columns.tensor
    share = np.select(
        [columns.attention == FLASH_ATTENTION_1, columns.attention == FLASH_ATTENTION_2],
        [constants.of("first_flash", columns), constants.of("second_flash", columns)],
        constants.of("fused_flash", columns),
    )
    rate = columns.peak * share * length / (length + constants.of("half_length", columns))
    causal = 2 * columns.tokens * length * heads * head / rate  # half of 4 T S E H: what lies before
    # Forward runs somewhat above the rate of both together, backward below it.
    flash_forward, flash_backward = 0.85 * causal, 1.06 * 2.5 * causal

    count = columns.micro_batch * heads
    odd = np.where(head % 8 > 0, constants.of("odd_heads", columns), 1.0)
    scores = odd * product.seconds(length, length, head, count=count)
    values = odd * product.seconds(length, head, length, count=count)
    # Masked softmax and dropout, 2 bytes per score read or written, 1 for the dropout's mask.
    per_score = count * length * length / (columns.memory_rate * constants.of("memory", columns))
    materialised = columns.attention == MATERIALIZED_SCORES
    forward = np.where(materialised, scores + values + 9 * per_score, flash_forward)
    backward = np.where(materialised, 2 * scores + 2 * values + 11 * per_score, flash_backward)
    return forward, backward


def _pointwise(columns: WorkloadColumns, constants: Constants) -> Column:
    """Of a layer's forward pass: norms, residuals, activation, rotation; bytes in 16 bits, read and written."""
    compiled = np.isin(columns.family, _COMPILED)
    fused = np.where((columns.fused > 0) | compiled, constants.of("fused_traffic", columns), 1.0)
    # XLA cuts what lies between blocks over the tensor axis by itself.
    cut = np.where((columns.sequence_parallel > 0) | compiled, columns.tensor, 1.0)
    between = 22 * columns.hidden / cut
    inside = columns.inner * (4 + 2 * columns.gated) / columns.tensor
    rotation = 4 * (columns.heads + columns.kv_heads) * columns.head_dim / columns.tensor
    traffic = columns.tokens * (between + inside + rotation)
    seconds: Column = fused * traffic / (columns.memory_rate * constants.of("memory", columns))
    return seconds


_COMPILED = (3.0, 4.0)  # families whose programs are always compiled as a whole: trainium, tpu


def _head(columns: WorkloadColumns, constants: Constants, product: _Products) -> Column:
    """Output projection in 16 bits, and the loss: logits in fp32, read and written five times."""
    rows = columns.vocab / columns.tensor
    products = sum(product.all_three(columns.tokens, rows, columns.hidden))
    loss = columns.tokens * rows * 20 / (columns.memory_rate * constants.of("memory", columns))
    seconds: Column = products + loss
    return seconds
