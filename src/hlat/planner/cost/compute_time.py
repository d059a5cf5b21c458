"""Time of computation: one layer forward and backward, and the LM head.

    columns, constants -> products + attention + pointwise operations + gaps between kernels -> ComputeTimes

A product of (M, K) by (K, N) takes its FLOPs, in complete tiles, at the rate that large products sustain, plus a share
of its memory traffic. Relative to the FLOPs that share is (peak / bandwidth) (1/M + 1/N + 1/K), so that small products
are slow in proportion to the chip's FLOPs per byte.

Backward takes two products for each of forward (gradients of input and weight). Flash attention's backward recomputes
its scores: 5 products against 2. Notation as in model/counts.py; T is the tokens of a micro-batch on a rank.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.planner.cost.calibration import Constants
from hlat.planner.cost.program import HLAT, Program
from hlat.planner.problem.workload import (
    CHIP_FAMILIES,
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    MATERIALIZED_SCORES,
    Column,
    WorkloadColumns,
    block_products,
    layer_weights,
)

_TILE = 128  # rows and columns of a tile; about this many in the libraries of all makers
_LOADED = 8  # elements of 16 bits, 16 bytes: what one instruction of a fast copy loads
# Bytes per element that norms and rotations of separate operations move besides those of fused ones.
_COMPOSED_NORMS = 2 * (36 - 4)  # both norms
_COMPOSED_ROTATION = 22 - 4
_KERNELS = (30, 24)  # per layer forward, copies and collective launches included: materialized scores, flash attention
# transformers, modeling_llama.py. LlamaRMSNorm: to fp32, square, mean, add, root, product, to 16 bits, product;
# apply_rotary_pos_emb: two products, a negation, a concatenation and a sum for queries and for keys.
_COMPOSED_KERNELS = 2 * 7 + 8  # more than those of fused norms and rotations
_BACKWARD_KERNELS = 1.7  # per forward kernel
# Bytes per score in memory, forward and backward: 2 for each time it is read or written, 1 for the dropout mask.
_SOFTMAX_BYTES = 9.0, 11.0
_POINTWISE_BACKWARD = 1.5  # bytes per byte of forward


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of one micro-batch on a rank, per layer unless stated otherwise."""

    forward: Column  # one pass, without communication and the host's launch time
    backward: Column
    products: Column  # forward and backward together, as attention, pointwise and gaps
    forward_products: Column
    attention: Column
    pointwise: Column
    gaps: Column
    attention_forward: Column  # the attention core alone
    attention_backward: Column
    host_forward: Column  # the host launches the kernels of a pass
    host_backward: Column
    head: Column  # output projection and loss, forward and backward; per model, not per layer
    embedding: Column  # rows looked up, and the gradient of the table; per model
    weight: Column  # the share of backward that computes gradients of weights
    last: Column  # the last product of the block's forward pass


def compute_times(columns: WorkloadColumns, constants: Constants, program: Program = HLAT) -> ComputeTimes:
    """Computation time of the slowest rank."""
    product = Products.of(columns, constants)
    # Bytes that a kernel moves per gradient and micro-batch to add it: 16 bits read, the sum read and written. A sum is
    # torch's .grad: the gradient of the first micro-batch becomes it, and nothing is added.
    sum_traffic = (1 - 1 / columns.micro_batches) * (2 + 2 * columns.gradient_bytes)
    forward_products, input_products, weight_products = layer_products(columns, product)
    weight_products = weight_products + _weight_sums(columns, constants, product, sum_traffic)
    casts_forward, casts_backward = program.cast_times(columns, constants)
    forward_products, input_products = forward_products + casts_forward, input_products + casts_backward
    backward_products = input_products + weight_products
    attention_forward, attention_backward = _attention(columns, constants, product)
    pointwise = _pointwise(columns, constants)
    intermediate = columns.intermediate / columns.tensor
    kernels = np.where(columns.attention == MATERIALIZED_SCORES, _KERNELS[0], _KERNELS[1])
    kernels = kernels + _COMPOSED_KERNELS * columns.composed
    gaps = kernels * constants.column("kernel", columns)
    host = kernels * constants.column("host", columns) * columns.eager
    return ComputeTimes(
        forward=forward_products + attention_forward + pointwise + gaps,
        backward=backward_products + attention_backward + _POINTWISE_BACKWARD * pointwise + _BACKWARD_KERNELS * gaps,
        products=forward_products + backward_products,
        forward_products=forward_products,
        attention=attention_forward + attention_backward,
        pointwise=(1 + _POINTWISE_BACKWARD) * pointwise,
        gaps=(1 + _BACKWARD_KERNELS) * gaps,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
        host_forward=host,
        host_backward=_BACKWARD_KERNELS * host,
        head=_head(columns, constants, product, sum_traffic),
        embedding=_embedding(columns, constants, sum_traffic),
        weight=weight_products,
        last=product.seconds(columns.tokens, columns.hidden, intermediate, in_blocks=True),
    )


@dataclass(frozen=True)
class Products:
    """Time of matrix products on the workloads' devices."""

    columns: WorkloadColumns
    rate: Column  # FLOP/s of large products in 16 bits
    rate_in_blocks: Column  # the same in the precision of decoder blocks (16 or 8 bits)
    unhidden: Column  # share of the memory traffic that computation does not hide
    unaligned: Column  # slowdown where rows of an operand are not multiples of 16 bytes; 1 if a compiler pads them

    @classmethod
    def of(cls, columns: WorkloadColumns, constants: Constants) -> "Products":
        rate = columns.peak * columns.reached * constants.column("products", columns)
        eight = columns.peak_eight_bit * columns.reached_eight_bit * constants.column("eight_bit", columns)
        in_blocks = np.where(columns.eight_bit > 0, eight, rate)
        unaligned = np.where(columns.pads_rows > 0, 1.0, constants.column("unaligned", columns))
        return cls(columns, rate, in_blocks, constants.column("unhidden", columns), unaligned)

    def seconds(
        self, m: Column, n: Column, k: Column, *, in_blocks: bool = False, count: Column | float = 1.0
    ) -> Column:
        """Seconds of ``count`` products (m, k) by (k, n); ``in_blocks`` for the precision of decoder blocks."""
        rate = self.rate_in_blocks if in_blocks else self.rate
        operand = np.where(self.columns.eight_bit > 0, 1.0, 2.0) if in_blocks else 2.0
        tiles_m, tiles_n = np.ceil(m / _TILE), np.ceil(n / _TILE)
        padding = tiles_m * _TILE / m * tiles_n * _TILE / n
        arithmetic = 2 * count * m * n * k / rate * padding
        traffic = count * (2.0 * m * n + operand * (m * k + n * k))
        seconds: Column = arithmetic + self.unhidden * traffic / self.columns.memory_rate
        return seconds

    def forward_and_backward(
        self, m: Column, n: Column, k: Column, *, in_blocks: bool = False
    ) -> tuple[Column, Column, Column]:
        """Seconds of (m, k) by (k, n) forward, of the input's gradient and of the weight's gradient."""
        # Each of the three products has matrices with rows of k elements and with rows of n.
        slower = self.slowdown(k, n)
        return (
            slower * self.seconds(m, n, k, in_blocks=in_blocks),
            slower * self.seconds(m, k, n, in_blocks=in_blocks),
            slower * self.seconds(k, n, m, in_blocks=in_blocks),
        )

    def slowdown(self, *rows: Column) -> Column:
        """Slowdown of a product whose operands have rows of so many elements."""
        odd = np.logical_or.reduce([length % _LOADED > 0 for length in rows])
        return np.where(odd, self.unaligned, 1.0)


def layer_products(columns: WorkloadColumns, product: Products) -> tuple[Column, Column, Column]:
    """Seconds of one layer's products: forward, gradients of inputs, gradients of weights; without casts and sums."""
    times = [
        product.forward_and_backward(columns.tokens, rows, width, in_blocks=True)
        for rows, width in block_products(columns)
    ]
    forward, by_input, by_weight = (sum(each) for each in zip(*times, strict=True))
    return forward, by_input, by_weight


def _weight_sums(columns: WorkloadColumns, constants: Constants, product: Products, sum_traffic: Column) -> Column:
    """Seconds in which the gradients of one layer's weights are added to those of the step."""
    # Gradient accumulation: the product reads and writes the fp32 gradients of weights at its end.
    in_product = np.where(columns.zero < 3, 8 * product.unhidden / columns.memory_rate, 0.0)
    apart = sum_traffic / _memory_rate(columns, constants)
    seconds: Column = layer_weights(columns) * np.where(_adds_apart(columns), apart, in_product)
    return seconds


def _attention(columns: WorkloadColumns, constants: Constants, product: Products) -> tuple[Column, Column]:
    """Seconds of the attention core, forward and backward: scores, softmax, and their product with the values."""
    length, head = columns.sequence, columns.head_dim
    heads = columns.heads / columns.tensor
    share = np.select(
        [columns.attention == FLASH_ATTENTION_1, columns.attention == FLASH_ATTENTION_2],
        [constants.column("first_flash", columns), constants.column("second_flash", columns)],
        constants.column("fused_flash", columns),
    )
    rate = columns.peak * columns.attention_rate * share * length / (length + constants.column("half_length", columns))
    window = np.minimum(columns.window, length)
    attended = window * (2 - window / length)  # twice the mean number of positions: for a causal mask their number
    causal = 2 * columns.tokens * attended * heads * head / rate  # half of 4 T S E H, for a causal mask
    # The measured rate is of both passes together: forward is somewhat faster, backward slower.
    flash_forward = columns.attention_forward * 0.85 * causal
    flash_backward = columns.attention_backward * 1.06 * 2.5 * causal

    count = columns.micro_batch * heads
    slowdown = product.slowdown(head)
    scores = slowdown * product.seconds(length, length, head, count=count)
    values = slowdown * product.seconds(length, head, length, count=count)
    per_score = count * length * length / _memory_rate(columns, constants)
    materialized = columns.attention == MATERIALIZED_SCORES
    forward = np.where(materialized, scores + values + _SOFTMAX_BYTES[0] * per_score, flash_forward)
    backward = np.where(materialized, 2 * scores + 2 * values + _SOFTMAX_BYTES[1] * per_score, flash_backward)
    return forward, backward


def _pointwise(columns: WorkloadColumns, constants: Constants) -> Column:
    """Seconds of a layer's forward norms, residuals, activation and rotary embedding, in 16 bits."""
    # XLA shards activations between blocks over the tensor axis by itself.
    shards = np.where((columns.sequence_parallel > 0) | np.isin(columns.family, _COMPILED), columns.tensor, 1.0)
    between = (22 + _COMPOSED_NORMS * columns.composed) * columns.hidden / shards
    inside = columns.intermediate * (4 + 2 * columns.gated) / columns.tensor
    rotated = (columns.heads + columns.kv_heads) * columns.head_dim / columns.tensor
    rotation = (4 + _COMPOSED_ROTATION * columns.composed) * rotated
    seconds: Column = columns.tokens * (between + inside + rotation) / _memory_rate(columns, constants)
    return seconds


_COMPILED = tuple(float(code) for code, family in enumerate(CHIP_FAMILIES.values()) if family.compiled)


def _head(columns: WorkloadColumns, constants: Constants, product: Products, sum_traffic: Column) -> Column:
    """Seconds of the output projection in 16 bits, of the loss, and of adding the gradient of its weights."""
    rows = columns.vocab / columns.tensor
    products = sum(product.forward_and_backward(columns.tokens, rows, columns.hidden))
    memory = _memory_rate(columns, constants)
    loss = columns.tokens * rows * columns.loss_bytes / memory
    in_product = np.where(_accumulates(columns), 2 * columns.gradient_bytes * product.unhidden / columns.memory_rate, 0)
    sums = np.where(_adds_apart(columns), sum_traffic / memory, in_product)
    seconds: Column = products + loss + sums * rows * columns.hidden
    return seconds


def _memory_rate(columns: WorkloadColumns, constants: Constants) -> Column:
    """Bytes per second that operations on large tensors read and write."""
    return columns.memory_rate * constants.column("memory", columns)


def _adds_apart(columns: WorkloadColumns) -> NDArray[np.bool_]:
    """True where a kernel of its own adds the gradients of every micro-batch to whole sums."""
    whole = (columns.zero < 2) | (columns.pipeline > 1)
    found: NDArray[np.bool_] = (columns.adds_apart > 0) & _accumulates(columns) & whole
    return found


def _accumulates(columns: WorkloadColumns) -> NDArray[np.bool_]:
    """True where every micro-batch adds whole gradients to those of the step."""
    found: NDArray[np.bool_] = (columns.zero < 3) & (columns.micro_batches > 1)
    return found


def _embedding(columns: WorkloadColumns, constants: Constants, sum_traffic: Column) -> Column:
    """Seconds of the embedding, forward and backward."""
    # The gradient of the table is dense (torch.nn.Embedding without sparse; jax.numpy.take): set to zero, and added to
    # the sums of the step if there are several micro-batches and these sums are not sharded.
    table = columns.vocab / columns.tensor * columns.hidden
    added = np.where(_accumulates(columns), sum_traffic, 0.0)
    # Rows are copied, and their gradients added to those of the table: 8 bytes per element, in 16 bits.
    traffic = 8 * columns.tokens * columns.hidden + table * (2 + added)
    seconds: Column = traffic / _memory_rate(columns, constants)
    return seconds
