"""Memory of the second half of a split backward pass of one block: gradients by weights, operation by operation.

Zero-bubble schedules compute gradients by inputs first (block_backward.py). What that half keeps for this one is the
gradient by the output of every norm and product, counted in transient_sizes.py.
"""

from hlat.parallel.stages.memory.block_tape import BlockTape, BlockTensors, Peak, norm_tensors


def weight_peak(block: BlockTensors) -> Peak:
    """Compute the same for the second half: gradients by weights, in the order in which the block has its parameters.

        attention norm -> query, key, value -> output -> feed-forward norm -> gate and up -> down

    Beyond what the forward pass saved and all that the first half kept. What is recomputed for one weight stays for
    the others of the block (``activation_checkpointing/recomputation.py``), so that most of it is alive at the last
    products; by then the gradients by outputs and the inputs of the parameters before them are gone.
    """
    tape = BlockTape(block, keeps_recomputed=True)
    _weights_of_attention(tape, block)
    _weights_of_feed_forward(tape, block)
    return tape.peak


def _weights_of_attention(tape: BlockTape, block: BlockTensors) -> None:
    tape.need("attention_input")
    _norm_by_weight(tape, block, "attention_norm_scale", "attention_norm_weight_copy")
    tape.need("qkv")  # recomputed with its weights' copies, which a product unpacks although only its input is needed
    by_output: tuple[float, ...] = (block.queries, block.keys, block.keys)
    if len(block.weights["qkv"]) == 1:
        by_output = (sum(by_output),)
    _product_by_weight(tape, block, "qkv", "attention_input", by_output)
    tape.need("attention_output")
    _product_by_weight(tape, block, "output", "", (block.inside,))


def _weights_of_feed_forward(tape: BlockTape, block: BlockTensors) -> None:
    tape.need("residual")
    tape.need("feed_forward_input")
    _norm_by_weight(tape, block, "feed_forward_norm_scale", "feed_forward_norm_weight_copy")
    tape.need("gate_up")
    by_output = (2 * block.inner,) if len(block.weights["gate_up"]) == 1 else (block.inner, block.inner)
    _product_by_weight(tape, block, "gate_up", "feed_forward_input", by_output)
    tape.need("inner")
    tape.need("down_weight_copy")
    _product_by_weight(tape, block, "down", "inner", (block.inside,))


def _norm_by_weight(tape: BlockTape, block: BlockTensors, scale: str, weight: str) -> None:
    """Differentiate a norm again, for its weight; the gradient by its output is freed."""
    tape.briefly(*norm_tensors(block))
    tape.free(block.stream, scale, weight)


def _product_by_weight(
    tape: BlockTape, block: BlockTensors, name: str, saved: str, by_output: tuple[float, ...]
) -> None:
    """Compute the gradients by the weights of products with one input.

    torch refers to a gradient until the next one exists (``dweights`` in ``stage_backward_weight``).
    """
    sizes = block.weights[name][::-1]  # in the order of the parameters
    for index, (size, output) in enumerate(zip(sizes, by_output, strict=True)):
        tape.add(size * block.item)
        tape.free_copy(f"{name}_weight_copy", size / sum(sizes), last=False)
        if block.cast:
            tape.add(size * block.cast)
            tape.free(size * block.item)
        if index == len(sizes) - 1:
            tape.free(saved)
        tape.replace(size * ((block.cast or block.item) - block.kept))
        tape.free(output)
