# mypy: ignore-errors
"""Operators of pointwise operations and loss on GPUs, in Triton: operands are read once, results written once.

    operands, results without values --> a tile of rows per program, computed in fp32 --> values of the results

The loss reads logits twice, 6 bytes per bf16 logit: once for the sums, which ranks may have to reduce, and once to
overwrite them by their gradient. Sums of a row are made within a program, and gradients of norm weights by blocks of
rows whose size depends on the shape only. No program adds to what another one writes, so results have the same bits
each time.

Triton's exponential has a relative error of about |x| 2^-24 at x. It is multiplied by a number below e^x or added to
larger ones, so that results are as exact as those of torch. Compiled for GPUs and run in Triton's interpreter by
tests; not yet run on a GPU. Triton kernels are not typed Python, so mypy skips this file.

Tensor suffixes: N tokens, V vocabulary, W width of a row.
"""

import torch
import triton
import triton.language as tl

from hlat.model.kernels.library import place_of_rows

_TILE = 2048  # elements of a program
_LOSS_BLOCK = 8192  # logits of a program at a time
_PARTS = 512  # blocks of rows at most that are summed for the gradient of a norm's weight
_SMALLEST_PART = 64  # rows


def rms_norm(x, weight, eps, out, scale):
    """Write output and scale, complete rows in a tile."""
    width, rows = x.shape[-1], scale.numel()
    tile, block = _tile(width)
    x, *place = place_of_rows(x)
    grid = (triton.cdiv(rows, tile),)
    _norm[grid](x, weight.contiguous(), out, scale, rows, width, *place, eps, tile, block, num_warps=_warps(block))


def rms_norm_backward(gradient, x, weight, scale, by_x, by_weight):
    """Write gradients by input and weight; the latter is summed over parts of the rows."""
    width, rows = x.shape[-1], scale.numel()
    tile, block = _tile(width)
    # A function of the shape only, so that results have the same bits each time.
    part = triton.cdiv(max(_SMALLEST_PART, triton.cdiv(rows, _PARTS)), tile) * tile
    partial = torch.empty((triton.cdiv(rows, part), width), dtype=torch.float32, device=x.device)
    (x, *x_place), (gradient, *gradient_place) = place_of_rows(x), place_of_rows(gradient)
    operands = (gradient, x, weight.contiguous(), scale.contiguous(), by_x, partial)
    sizes = (rows, width, *gradient_place, *x_place, part)
    _norm_backward[(len(partial),)](*operands, *sizes, tile, block, num_warps=_warps(block))
    by_weight.copy_(partial.sum(0))


def rotate(x_BSGRE, cos, sin, direction, out):
    """Write the rotated heads, a tile of heads of one position at a time."""
    x_BSGRE = x_BSGRE if x_BSGRE.stride(-1) == 1 else x_BSGRE.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, sequence, groups, heads, width = x_BSGRE.shape
    half = width // 2
    table_step = sequence * half if cos.dim() == x_BSGRE.dim() and cos.shape[0] > 1 else 0
    tile, block = _tile(half)
    grid = (batch * sequence, triton.cdiv(groups * heads, tile))
    strides = x_BSGRE.stride()[:-1]
    _rotate[grid](x_BSGRE, cos, sin, out, sequence, groups, heads, half, *strides, table_step, direction, tile, block)


def swiglu(gate, up, out):
    """Write ``silu(gate) * up``."""
    (gate, *gate_place), (up, *up_place) = place_of_rows(gate), place_of_rows(up)
    rows, width, grid, tile, block = _tiles(gate)
    _swiglu[grid](gate, up, out, rows, width, *gate_place, *up_place, tile, block)


def swiglu_backward(gradient, gate, up, by_gate, by_up):
    """Write both gradients, each with rows where its tensor has them."""
    operands = [place_of_rows(each) for each in (gradient, gate, up, by_gate, by_up)]
    places = [number for _, *place in operands for number in place]
    rows, width, grid, tile, block = _tiles(gate)
    _swiglu_backward[grid](*(tensor for tensor, *_ in operands), rows, width, *places, tile, block)


def cross_entropy_sums(logits_NV, rows_N, peak, total, label):
    """Write largest logit, sum of exponentials and label of each token, a program per token."""
    rows, width = logits_NV.shape
    block = min(_LOSS_BLOCK, _power(width))
    _loss_sums[(rows,)](logits_NV, rows_N.contiguous(), peak, total, label, width, block, num_warps=_warps(block))


def cross_entropy_gradient_(logits_NV, rows_N, peak_N, factor_N):
    """Overwrite logits by the gradient of the loss."""
    rows, width = logits_NV.shape
    block = min(_TILE, _power(width))
    of_tokens = (each.contiguous() for each in (rows_N, peak_N, factor_N))
    _loss_gradient[(rows, triton.cdiv(width, block))](logits_NV, *of_tokens, width, block)


def first_equal(logits_NV, values_N, found):
    """Write the first column with a value for each token, a program per token."""
    rows, width = logits_NV.shape
    block = min(_LOSS_BLOCK, _power(width))
    _first_equal[(rows,)](logits_NV, values_N.contiguous(), found, width, block, num_warps=_warps(block))


def _power(width):
    return triton.next_power_of_2(max(1, width))


def _tile(width):
    block = _power(width)
    return max(1, _TILE // block), block


def _tiles(x):
    """Return rows, width, the grid of tiles that cover them, and the rows and columns of a tile."""
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    block = min(_TILE, _power(width))
    tile = _TILE // block
    return rows, width, (triton.cdiv(rows, tile), triton.cdiv(width, block)), tile, block


def _warps(block):
    # For a program that sums over a row: about 16 elements for each thread.
    return min(16, max(4, block // 512))


@triton.jit
def _offsets(row, inner, outer_stride, inner_stride):
    """Offsets at which rows begin: ``inner`` rows at a stride, and so on for every outer index."""
    # int32 would overflow at 2^31 elements.
    row = row.to(tl.int64)
    return row // inner * outer_stride + row % inner * inner_stride


@triton.jit
def _norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    eps,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = _offsets(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / tl.maximum(width, 1) + eps)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + column[None, :], out, mask=inside)


@triton.jit
def _norm_backward(
    gradient_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    by_x_ptr,
    partial_ptr,
    rows,
    width,
    gradient_inner,
    gradient_outer_stride,
    gradient_inner_stride,
    inner,
    outer_stride,
    inner_stride,
    part,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    sums = tl.zeros((TILE, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * part
    for start in range(0, part, TILE):
        row = first + start + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        x_at = _offsets(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
        gradient_at = _offsets(row, gradient_inner, gradient_outer_stride, gradient_inner_stride)
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + gradient_at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        normal = x * scale
        product = gradient * normal
        sums += product
        along = tl.sum(product * weight[None, :], 1)[:, None] / width
        by_x = (gradient * weight[None, :] - normal * along) * scale
        tl.store(by_x_ptr + row[:, None] * width + column[None, :], by_x, mask=inside)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * width + column, tl.sum(sums, 0), mask=column < width)


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    sequence,
    groups,
    heads,
    half,
    batch_stride,
    position_stride,
    group_stride,
    head_stride,
    table_step,
    direction,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    inside = (head < groups * heads)[:, None] & (column < half)[None, :]
    table = position // sequence * table_step + position % sequence * half + column
    cos = tl.load(cos_ptr + table, mask=column < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + table, mask=column < half, other=0.0)[None, :] * direction
    start = position // sequence * batch_stride + position % sequence * position_stride
    at = (start + _offsets(head, heads, group_stride, head_stride))[:, None] + column[None, :]
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + ((position * groups * heads + head) * 2 * half)[:, None] + column[None, :]
    tl.store(out, first * cos - second * sin, mask=inside)
    tl.store(out + half, second * cos + first * sin, mask=inside)


@triton.jit
def _tile_of_program(rows, width, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    return row, column, (row < rows)[:, None] & (column < width)


@triton.jit
def _load(ptr, row, inner, outer_stride, inner_stride, column, inside):
    at = _offsets(row, inner, outer_stride, inner_stride)[:, None] + column
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _swiglu(
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    width,
    gate_inner,
    gate_outer_stride,
    gate_inner_stride,
    up_inner,
    up_outer_stride,
    up_inner_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _tile_of_program(rows, width, TILE, BLOCK)
    gate = _load(gate_ptr, row, gate_inner, gate_outer_stride, gate_inner_stride, column, inside)
    up = _load(up_ptr, row, up_inner, up_outer_stride, up_inner_stride, column, inside)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + column, out, mask=inside)


@triton.jit
def _swiglu_backward(
    gradient_ptr,
    gate_ptr,
    up_ptr,
    by_gate_ptr,
    by_up_ptr,
    rows,
    width,
    gradient_inner,
    gradient_outer_stride,
    gradient_inner_stride,
    gate_inner,
    gate_outer_stride,
    gate_inner_stride,
    up_inner,
    up_outer_stride,
    up_inner_stride,
    by_gate_inner,
    by_gate_outer_stride,
    by_gate_inner_stride,
    by_up_inner,
    by_up_outer_stride,
    by_up_inner_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _tile_of_program(rows, width, TILE, BLOCK)
    gradient = _load(gradient_ptr, row, gradient_inner, gradient_outer_stride, gradient_inner_stride, column, inside)
    gate = _load(gate_ptr, row, gate_inner, gate_outer_stride, gate_inner_stride, column, inside)
    up = _load(up_ptr, row, up_inner, up_outer_stride, up_inner_stride, column, inside)
    by_gate_at = _offsets(row, by_gate_inner, by_gate_outer_stride, by_gate_inner_stride)[:, None] + column
    by_up_at = _offsets(row, by_up_inner, by_up_outer_stride, by_up_inner_stride)[:, None] + column
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(by_up_ptr + by_up_at, gradient * (gate * sigmoid), mask=inside)
    tl.store(by_gate_ptr + by_gate_at, gradient * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), mask=inside)


@triton.jit
def _loss_sums(logits_ptr, rows_ptr, peak_ptr, total_ptr, label_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    logits = logits_ptr + token.to(tl.int64) * width
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(value, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # else -infinity less itself, which is NaN
        # A NaN reaches the sum, whatever the largest logit is.
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(value - base), 0)
        peak = higher
    row = tl.load(rows_ptr + token)
    label = tl.load(logits + row, mask=(row >= 0) & (row < width), other=0.0).to(tl.float32)
    tl.store(peak_ptr + token, peak)
    tl.store(total_ptr + token, total)
    tl.store(label_ptr + token, label)


@triton.jit
def _loss_gradient(logits_ptr, rows_ptr, peak_ptr, factor_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + token.to(tl.int64) * width + column
    value = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    gradient = tl.exp(value - tl.load(peak_ptr + token)) * tl.load(factor_ptr + token)
    tl.store(at, gradient - tl.where(column == tl.load(rows_ptr + token), 1.0, 0.0), mask=column < width)


@triton.jit
def _first_equal(logits_ptr, values_ptr, found_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    logits = logits_ptr + token.to(tl.int64) * width
    wanted = tl.load(values_ptr + token)
    found = width + tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        equal = (value == wanted) & (column < width)
        found = tl.minimum(found, tl.min(tl.where(equal, column, width), 0))
    tl.store(found_ptr + token, found.to(tl.int64))
