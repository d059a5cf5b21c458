"""Memory of the backward pass of one block, and of head, loss and embedding, operation by operation.

    BlockTensors (sizes) -> BlockTape: allocate, free, recompute, in the order of the operations -> Peak

    gradient by the block's output
      -> (gather) -> down product -> SwiGLU -> gate and up product -> (scatter) -> norm -> +
      -> (gather) -> output product -> core attention -> rotation -> query, key, value product -> (scatter) -> norm -> +
      -> gradient by the block's input

    final norm -> (gather) -> chunks of: logits -> loss, gradient by logits -> gradients by hidden and by the head
    gradient by the first block's input -> (gather, mask) -> gradient by the embedding

Each step allocates gradients and temporary tensors, and frees what the forward pass saved for it. The lists follow the
operations of ``model`` (layers.py, pointwise.py, matmul.py, loss.py) and of ``parallel/tensor_parallel.py`` in eager
mode. Steps that are recomputed allocate their results when backward first needs one of them
(``activation_checkpointing``). Architectures with norms in other places are counted alike: their norms run elsewhere,
with the same tensors.

Zero-bubble schedules split the backward pass: gradients by inputs first, gradients by weights in a second half. What
the first half keeps for the second, the gradient by the output of every norm and product, is counted in
transient_sizes.py. Gradients of head and loss are computed in the forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hlat.config import ModelConfig
from hlat.model import HEAD_ROWS, CrossEntropy, ModelShard, vocabulary_rows

_FP32 = 4
_CHAIN = (  # steps of RECOMPUTABLE in order of execution: a recomputed step needs the one before it
    "attention_input",
    "qkv",
    "attention_output",
    "residual",
    "feed_forward_input",
    "gate_up",
    "inner",
)
CORE_STEPS = frozenset({"attention_log_sum", "attention_output"})  # steps that run core attention again
# Tensors that core attention saves with context parallelism, and where no fused kernel computes it
CORE_TENSORS = frozenset(
    {"gathered_keys_values", "attention_chunks", "attention_masks", "attention_scores", "repeated_keys_values"}
)
# Scores that attention without a fused kernel has beyond those that it keeps. Forward: those before softmax, and a mask
# of bytes, for 4 of a score; backward: the gradients by those after and before softmax.
_SCORES_FORWARD, _SCORES_BACKWARD = 1.25, 2.0


@dataclass(frozen=True)
class BlockTensors:
    """Bytes of the tensors of a block's backward pass, for one micro-batch on one rank."""

    saved: Mapping[str, float]  # by the forward pass, by name (``hlat.model.activation_bytes``)
    # Tensors of each recomputed step, which backward allocates, by step and name
    recomputed: Mapping[str, Mapping[str, float]]
    stream: float  # the residual stream between attention and feed-forward; sharded with sequence parallelism
    inside: float  # the input of attention and of the feed-forward layer, (B, S, D)
    queries: float
    keys: float  # keys (or values)
    inner: float  # the intermediate activation of the feed-forward layer
    item: int  # of an element
    # Elements of the weights of "qkv", "output", "gate_up" and "down": of one matrix product, or of several with the
    # same input, in the order of backward.
    weights: Mapping[str, tuple[float, ...]]
    gathers: bool  # with sequence parallelism
    reduces: bool  # with tensor parallelism without sequence parallelism
    reorders: bool  # gathered sequences are copied into another order: of several rows
    cast: float  # per element of gradients by weights that are cast to another dtype; 0 if they are not
    kept: float  # per element of gradients by weights after that, until the end of the block
    fused: bool = False  # norms, rotations and SwiGLU need no temporary tensors
    head_sums: float = 0.0  # the gradients by keys and values from each query head; 0 if attention makes none
    scores: float = 0.0  # of all pairs of positions of one call of attention; 0 if it does not keep them


@dataclass(frozen=True)
class Peak:
    """Most bytes that a pass has beyond what the forward pass saved; of them those of recomputed tensors."""

    total: float
    recomputed: float = 0.0


class BlockTape:
    """Bytes beyond those that the forward pass saved: now, and at the peak."""

    def __init__(self, block: BlockTensors, keeps_saved: bool = False, keeps_recomputed: bool = False) -> None:
        self.now, self.peak = 0.0, Peak(0.0)
        # In the first half of a split backward pass, what gradients by weights need stays; in the second half,
        # recomputed tensors stay until the block is done.
        self.keeps_saved, self._keeps_recomputed = keeps_saved, keeps_recomputed
        self._replaceable = 0.0
        self._block, self._saved, self._alive = block, block.saved, dict(block.saved)
        self._steps = dict(block.recomputed)  # not run again yet
        self._waiting: dict[str, set[str]] = {}  # by step that ran again: its tensors that are still to be unpacked

    def add(self, *sizes: float) -> None:
        self.now += sum(sizes)
        if self.now > self.peak.total:
            recomputed = sum(size for name, size in self._alive.items() if name not in self._saved)
            self.peak = Peak(self.now, recomputed)

    def free(self, *tensors: float | str) -> None:
        """Free tensors: by size, or by name those that the forward pass saved or that were recomputed."""
        for tensor in tensors:
            if not isinstance(tensor, str):
                self.now -= tensor
            elif tensor in self._saved:
                self.now -= 0.0 if self.keeps_saved else self._alive.pop(tensor, 0.0)
            else:
                # All tensors of a recomputed step are freed with the last of them
                self._unpack(tensor)

    def free_copy(self, name: str, share: float, last: bool) -> None:
        """Free a share of a weight's cast copies; recomputed ones are freed all together with the last."""
        if name in self._saved:
            self.now -= 0.0 if self.keeps_saved else self._saved[name] * share
        elif last:
            self._unpack(name)

    def replace(self, size: float) -> None:
        """Free a tensor when the next one replaces it, and now the one before."""
        self.now -= self._replaceable
        self._replaceable = size

    def _unpack(self, name: str) -> None:
        if self._keeps_recomputed:
            return
        for step, names in list(self._waiting.items()):
            names.discard(name)
            if not names:
                del self._waiting[step]
                self.now -= sum(self._alive.pop(tensor) for tensor in self._block.recomputed[step])

    def briefly(self, *sizes: float) -> None:
        self.add(*sizes)
        self.free(*sizes)

    def need(self, step: str) -> None:
        """Recompute a step unless its results are alive, from the last step before it whose results are alive."""
        if step not in self._steps:
            return
        if step in _CHAIN[1:]:
            self.need(_CHAIN[_CHAIN.index(step) - 1])
        tensors = self._steps.pop(step)
        if tensors:
            self._waiting[step] = set(tensors)
            self._alive |= tensors
            self.add(*tensors.values())


def norm_tensors(block: BlockTensors) -> tuple[float, ...]:
    """Bytes of the tensors of a norm's backward pass, in fp32: grad, normal, product, grad_x; and grad_x rounded."""
    if block.fused:
        return (block.stream,)
    wide = block.stream * _FP32 / block.item
    return (wide,) * 4 + (block.stream,) if block.item < _FP32 else (wide,) * 3


def forward_bytes(block: BlockTensors) -> float:
    """Compute the bytes that a block's forward pass has beyond what it saves, when it computes its last product."""
    recomputed: dict[str, float] = {}
    for tensors in block.recomputed.values():
        recomputed |= tensors
    # The input of the feed-forward layer and the activations between its products live until the layer returns.
    alive = sum(recomputed.get(name, 0.0) for name in ("residual", "feed_forward_input", "gate_up", "inner"))
    cast = recomputed.get("down_weight_copy", 0.0)
    # Core attention, long before; what it does not keep it has now.
    core = block.scores * (_SCORES_FORWARD + ("attention_scores" not in block.saved))
    # The product before needs its own weights.
    wide = (
        alive
        - recomputed.get("inner", 0.0)
        + recomputed.get("gate_up_weight_copy", 0.0) / len(block.weights["gate_up"])
    )
    if block.gathers:  # the shard of that input; the product's output, in another order; the shard of its sum
        summed = block.inside * (1 + block.reorders) + block.stream
        return block.stream + max(alive + max(cast + block.inside, summed), wide, core)
    # The product's output; then its sum over the ranks, or with the residual stream.
    return max(alive + max(cast + block.inside, 2 * block.inside), wide, core)


def backward_peak(block: BlockTensors) -> Peak:
    """Compute the most bytes that a block's backward pass has beyond what its forward pass saved."""
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
    if "attention_scores" not in block.saved:
        tape.briefly(_SCORES_FORWARD * block.scores)
    tape.briefly(_SCORES_BACKWARD * block.scores)
    tape.add(block.queries, block.head_sums)
    tape.add(2 * block.keys)
    tape.free(block.head_sums)
    tape.briefly(again)
    tape.free(block.queries, "q", "k", "v", "attention_output", "attention_log_sum")
    tape.free(*CORE_TENSORS)
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
    """Gradients of matrix products: by the weights first, then by the input; of several, these are added."""
    sizes = block.weights[name]
    for index, (size, output) in enumerate(zip(sizes, by_output, strict=True)):
        last = index == len(sizes) - 1
        tape.add(size * block.item)
        tape.add(by_input)
        tape.free_copy(f"{name}_weight_copy", size / sum(sizes) if sum(sizes) else 0.0, last)
        if last:
            tape.free(saved)  # "" if something else needs it
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


def weight_peak(block: BlockTensors) -> Peak:
    """Compute the same for the second half, beyond all that the first half kept: gradients by weights."""
    # In the order in which the block has its parameters. What is recomputed for one weight stays for the others of the
    # block (activation_checkpointing/recomputation.py), so that most of it is alive at the last products; by then the
    # gradients by outputs and the inputs of the parameters before them are gone.
    tape = BlockTape(block, keeps_recomputed=True)
    tape.need("attention_input")
    _norm_by_weight(tape, block, "attention_norm_scale", "attention_norm_weight_copy")
    tape.need("qkv")  # recomputed with its weights' copies, which a product unpacks although only its input is needed
    by_output: tuple[float, ...] = (block.queries, block.keys, block.keys)
    if len(block.weights["qkv"]) == 1:
        by_output = (sum(by_output),)
    _product_by_weight(tape, block, "qkv", "attention_input", by_output)
    tape.need("attention_output")
    _product_by_weight(tape, block, "output", "", (block.inside,))
    tape.need("residual")
    tape.need("feed_forward_input")
    _norm_by_weight(tape, block, "feed_forward_norm_scale", "feed_forward_norm_weight_copy")
    tape.need("gate_up")
    by_output = (2 * block.inner,) if len(block.weights["gate_up"]) == 1 else (block.inner, block.inner)
    _product_by_weight(tape, block, "gate_up", "feed_forward_input", by_output)
    tape.need("inner")
    tape.need("down_weight_copy")
    _product_by_weight(tape, block, "down", "inner", (block.inside,))
    return tape.peak


def _norm_by_weight(tape: BlockTape, block: BlockTensors, scale: str, weight: str) -> None:
    """Differentiate a norm again, for its weight; the gradient by its output is freed."""
    tape.briefly(*norm_tensors(block))
    tape.free(block.stream, scale, weight)


def _product_by_weight(
    tape: BlockTape, block: BlockTensors, name: str, saved: str, by_output: tuple[float, ...]
) -> None:
    """Gradients by the weights of products with one input."""
    sizes = block.weights[name][::-1]  # in the order of the parameters
    for index, (size, output) in enumerate(zip(sizes, by_output, strict=True)):
        tape.add(size * block.item)
        tape.free_copy(f"{name}_weight_copy", size / sum(sizes), last=False)
        if block.cast:
            tape.add(size * block.cast)
            tape.free(size * block.item)
        if index == len(sizes) - 1:
            tape.free(saved)
        # Torch refers to a gradient until the next one exists (dweights in stage_backward_weight).
        tape.replace(size * ((block.cast or block.item) - block.kept))
        tape.free(output)


@dataclass(frozen=True)
class EndTensors:
    """Sizes outside of the blocks, for one micro-batch on one rank."""

    model: ModelConfig
    tensor: int  # tensor-parallel ranks
    tokens: float  # of a micro-batch on the rank
    item: int  # bytes of an activation element
    stored: int  # bytes of a weight element as it reaches the module
    gathers: bool  # with sequence parallelism
    reorders: bool  # gathered sequences are copied into another order: of several rows
    rounds: bool  # the embedding's gradient is accumulated in fp32 where its weights are bf16
    fused: bool = False  # norms need no temporary tensors, and the gradient by logits overwrites them

    @property
    def inside(self) -> float:
        """Bytes of hidden states, (B, S, D)."""
        return self.tokens * self.item * self.model.hidden_size

    @property
    def stream(self) -> float:
        """Bytes of the residual stream; sharded with sequence parallelism."""
        return self.inside / (self.tensor if self.gathers else 1)

    @property
    def matrix(self) -> float:
        """Elements (not bytes) of the head or of the embedding."""
        return len(vocabulary_rows(self.model, ModelShard(0, self.tensor))) * float(self.model.hidden_size)


def loss_peak(ends: EndTensors) -> float:
    """Compute the most bytes that head and loss have in the forward pass, beyond what the final norm saves."""
    rows, item = len(vocabulary_rows(ends.model, ModelShard(0, ends.tensor))), ends.item
    chunk = min(ends.tokens, CrossEntropy().chunk(rows, ends.model.hidden_size))
    whole = 2 * ends.inside + (ends.stream if ends.gathers else 0.0)  # hidden states, the gradient by them, their shard
    if item != ends.stored:
        whole += ends.matrix * item  # the head, cast
    # Logits in fp32, and their gradient; fp32 logits are overwritten.
    logit = item + (_FP32 + item if item < _FP32 and not ends.fused else 0)
    if ends.tokens <= chunk:
        term = ends.matrix * item
        rounded = term + (ends.matrix * ends.stored if item != ends.stored else 0)
        return whole + max(chunk * rows * logit, chunk * rows * item + term, rounded)
    # The second chunk adds to the first chunk's gradient by the head, which is rounded at the end.
    accumulated = ends.matrix * _FP32
    term = min(rows, HEAD_ROWS) * ends.model.hidden_size * item if item < _FP32 else 0.0
    second = min(chunk, ends.tokens - chunk)
    rounded = accumulated + (ends.matrix * ends.stored if ends.stored < _FP32 else 0.0)
    adding = accumulated + chunk * rows * item + term
    return whole + max(chunk * rows * logit, adding, accumulated + second * rows * logit, rounded)


def loss_backward_bytes(ends: EndTensors) -> float:
    """Bytes of the gradients by hidden states and head, which are multiplied by the gradient by the loss."""
    return ends.inside + ends.matrix * ends.stored


def final_norm_peak(ends: EndTensors) -> float:
    """Compute the most bytes of the final norm's backward pass: gradients by its output and input, fp32 tensors."""
    if ends.fused:
        return 2 * ends.stream
    wide = ends.stream * _FP32 / ends.item
    return ends.stream + (4 * wide + ends.stream if ends.item < _FP32 else 3 * wide)


def embedding_peak(ends: EndTensors) -> float:
    """Compute the most bytes while the embedding's gradient is computed: the gradient by its output and by itself."""
    gradient = ends.stream
    peak = gradient
    if ends.gathers:
        peak = gradient + ends.inside * (2 if ends.reorders else 1)
    if ends.tensor > 1:  # tokens of other ranks' rows are masked
        peak = max(peak, 2 * ends.inside)
    gradient = ends.inside
    wide = ends.inside * _FP32 / ends.item
    if ends.stored == _FP32:
        cast = wide if ends.item < _FP32 else 0.0
        return max(peak, gradient + cast + ends.matrix * _FP32)
    if ends.rounds:
        return max(peak, gradient + wide + ends.matrix * _FP32, gradient + ends.matrix * (_FP32 + ends.stored))
    return max(peak, gradient + ends.matrix * ends.stored)
