"""Memory of the backward pass of one block, operation by operation.

    gradient by the block's output
      -> (gather) -> down product -> SwiGLU -> gate and up product -> (scatter) -> norm -> +
      -> (gather) -> output product -> core attention -> rotation -> query, key, value product -> (scatter) -> norm -> +
      -> gradient by the block's input

Each step allocates gradients and temporary tensors, and frees what the forward pass saved for it. The list follows the
operations of ``model/layers.py``, ``model/pointwise.py`` and ``parallel/tensor_parallel.py`` in eager mode. Steps that
are recomputed allocate their results when backward first needs one of them (``activation_checkpointing``).

Architectures with norms in other places are counted alike: their norms run elsewhere, with the same tensors.
"""

from dataclasses import replace

from hlat.parallel.stages.memory.block_tape import CONTEXT_TENSORS, BlockTape, BlockTensors, Peak, norm_tensors

_FP32 = 4


def forward_bytes(block: BlockTensors) -> float:
    """Compute the bytes that a block's forward pass has beyond what it saves, when it computes its last product.

    The input of the feed-forward layer and the activations between its products live until the layer returns.
    """
    recomputed: dict[str, float] = {}
    for tensors in block.recomputed.values():
        recomputed |= tensors
    alive = sum(recomputed.get(name, 0.0) for name in ("residual", "feed_forward_input", "gate_up", "inner"))
    cast = recomputed.get("down_weight_copy", 0.0)
    # The product before needs its own weights.
    wide = (
        alive
        - recomputed.get("inner", 0.0)
        + recomputed.get("gate_up_weight_copy", 0.0) / len(block.weights["gate_up"])
    )
    if block.gathers:  # the shard of that input; the product's output, in another order; the shard of its sum
        summed = block.inside * (1 + block.reorders) + block.stream
        return block.stream + max(alive + max(cast + block.inside, summed), wide)
    # The product's output; then its sum over the ranks, or with the residual stream.
    return max(alive + max(cast + block.inside, 2 * block.inside), wide)


def backward_peak(block: BlockTensors) -> Peak:
    """Compute the most bytes that the backward pass of a block has beyond what its forward pass saved.

    The gradient by the block's output is included, and so are gradients by weights with ``kept`` bytes per element.
    """
    return _peak(BlockTape(block), block)


def input_peak(block: BlockTensors) -> Peak:
    """Compute the same for the first half of a split backward pass: gradients by inputs; all that was saved is kept."""
    without = replace(block, weights={name: (0.0,) * len(sizes) for name, sizes in block.weights.items()})
    return _peak(BlockTape(without, keeps_saved=True), without)


def _peak(tape: BlockTape, block: BlockTensors) -> Peak:
    tape.add(block.stream)
    _feed_forward(tape, block)
    _attention(tape, block)
    return tape.peak


def _feed_forward(tape: BlockTape, block: BlockTensors) -> None:
    _enter(tape, block)
    tape.need("inner")
    tape.need("down_weight_copy")
    _product(tape, block, "down", block.inner, "inner", (_gathered(block),))
    tape.need("gate_up")
    tape.add(2 * block.inner)
    tape.briefly(0.0 if block.fused else block.inner)  # silu(gate), then grad * up
    tape.free(block.inner, "gate_up")
    tape.need("feed_forward_input")
    by_output = (2 * block.inner,) if len(block.weights["gate_up"]) == 1 else (block.inner, block.inner)
    _product(tape, block, "gate_up", block.inside, "feed_forward_input", by_output)
    _scatter(tape, block)
    tape.need("residual")
    _norm(tape, block, "residual", "feed_forward_norm_scale", "feed_forward_norm_weight_copy")


def _attention(tape: BlockTape, block: BlockTensors) -> None:
    _enter(tape, block)
    tape.need("attention_output")
    _product(tape, block, "output", block.queries, "", (_gathered(block),))
    tape.need("qkv")
    tape.need("attention_log_sum")
    again = block.queries if "attention_log_sum" in block.recomputed else 0.0  # the core's output, a second time
    tape.add(block.queries, block.head_sums)
    tape.add(2 * block.keys)
    tape.free(block.head_sums)
    tape.briefly(again)
    tape.free(block.queries, "q", "k", "v", "attention_output", "attention_log_sum")
    tape.free(*CONTEXT_TENSORS)
    wide = block.queries * _FP32 / block.item
    # Rotation of the queries, in fp32.
    tape.briefly(*((wide, wide, block.queries) if block.item < _FP32 and not block.fused else (block.queries,)))
    by_output: tuple[float, ...] = (block.keys, block.keys, block.queries)
    if len(block.weights["qkv"]) == 1:  # the gradient by the fused projection is assembled
        by_output = (sum(by_output),)
        tape.briefly(*by_output)
    tape.free("qk_norm_input", "qk_norm_scale", "qk_norm_weight_copy")
    tape.need("attention_input")
    _product(tape, block, "qkv", block.inside, "attention_input", by_output)
    _scatter(tape, block)
    _norm(tape, block, "x", "attention_norm_scale", "attention_norm_weight_copy")


def _enter(tape: BlockTape, block: BlockTensors) -> None:
    """Gather the gradient by the output of a half of the block."""
    if block.gathers:
        tape.add(block.inside)
        if block.reorders:
            tape.briefly(block.inside)


def _gathered(block: BlockTensors) -> float:
    """Bytes of the gathered gradient by the output; 0 if it is the stream's own."""
    return block.inside if block.gathers else 0.0


def _product(
    tape: BlockTape, block: BlockTensors, name: str, by_input: float, saved: str, by_output: tuple[float, ...]
) -> None:
    """Compute gradients of matrix products: by the weights first, then by the input; of several, these are added.

    Args:
        tape: the tape.
        block: the block.
        name: the products' name among the weights.
        by_input: bytes of the gradient by their input.
        saved: name of their saved input, freed by the last; "" if something else needs it.
        by_output: bytes of the gradient by the output of each, freed by it.
    """
    sizes = block.weights[name]
    for index, (size, output) in enumerate(zip(sizes, by_output, strict=True)):
        last = index == len(sizes) - 1
        tape.add(size * block.item)
        tape.add(by_input)
        tape.free_copy(f"{name}_weight_copy", size / sum(sizes) if sum(sizes) else 0.0, last)
        if last:
            tape.free(saved)
        if index > 0:
            tape.free(by_input)  # added to that of the products before
        if not tape.keeps_saved:
            tape.free(output)
        if block.cast:
            tape.add(size * block.cast)
            tape.free(size * block.item)
        tape.free(size * ((block.cast or block.item) - block.kept))


def _scatter(tape: BlockTape, block: BlockTensors) -> None:
    """Sum the gradient by the input of a half over the tensor ranks: ``inside`` becomes ``stream``."""
    if block.gathers:
        if block.reorders:
            tape.add(block.inside)
            tape.free(block.inside)
        tape.add(block.stream)
        tape.free(block.inside)
    elif block.reduces:
        tape.briefly(block.inside)


def _norm(tape: BlockTape, block: BlockTensors, source: str, scale: str, weight: str) -> None:
    """Differentiate a norm and add the gradients of both branches of the residual stream."""
    tape.briefly(*norm_tensors(block))
    tape.free(source, scale, weight)
    if tape.keeps_saved:  # the gradient by its output stays, and that of the stream unless a gathered copy does
        tape.add(block.stream, block.stream)
        tape.free(block.stream * (2 if block.gathers else 1))
    else:  # the gradient by its output becomes that by its input
        tape.add(block.stream)
        tape.free(2 * block.stream)
