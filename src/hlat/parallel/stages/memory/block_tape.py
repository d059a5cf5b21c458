"""Bytes of a block's tensors while it runs backward: those that were saved, that are recomputed, that come and go.

BlockTensors (sizes) -> BlockTape: allocate, free, recompute, in the order of the operations -> Peak
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
CORE_STEPS = frozenset({"attention_log_sum", "attention_output"})
"""Steps that run core attention again."""
CONTEXT_TENSORS = frozenset({"gathered_keys_values", "attention_chunks", "attention_masks"})
"""Tensors that core attention saves with context parallelism."""


@dataclass(frozen=True)
class BlockTensors:
    """Bytes of the tensors of a block's backward pass, for one micro-batch on one rank.

    Attributes:
        saved: tensors saved by the forward pass, by name (``model.derived.activation_bytes``).
        recomputed: tensors of each recomputed step, which backward allocates, by step and name.
        stream: the residual stream between attention and feed-forward; sharded with sequence parallelism.
        inside: the input of attention and of the feed-forward layer, (B, S, D).
        queries, keys: queries, and keys (or values).
        inner: the intermediate activation of the feed-forward layer.
        item: bytes of an element.
        weights: elements of the weights of "qkv", "output", "gate_up" and "down": of one matrix product, or of several
            with the same input, in the order of backward.
        gathers: True with sequence parallelism.
        reduces: True with tensor parallelism without sequence parallelism.
        reorders: True if gathered sequences are copied into another order: of several rows.
        cast: bytes per element of gradients by weights that are cast to another dtype; 0 if they are not.
        kept: bytes per element of gradients by weights after that, until the end of the block.
        fused: True if norms, rotations and SwiGLU need no temporary tensors.
        head_sums: bytes of the gradients by keys and values from each query head; 0 if attention makes none.
    """

    saved: Mapping[str, float]
    recomputed: Mapping[str, Mapping[str, float]]
    stream: float
    inside: float
    queries: float
    keys: float
    inner: float
    item: int
    weights: Mapping[str, tuple[float, ...]]
    gathers: bool
    reduces: bool
    reorders: bool
    cast: float
    kept: float
    fused: bool = False
    head_sums: float = 0.0


@dataclass(frozen=True)
class Peak:
    """Most bytes that a pass has beyond what the forward pass saved.

    Attributes:
        total: all of them.
        recomputed: those of recomputed tensors.
    """

    total: float
    recomputed: float = 0.0


class BlockTape:
    """Bytes beyond those that the forward pass saved: now, and at the peak.

    Args:
        block: the block.
        keeps_saved: True for the first half of a split backward pass: what gradients by weights need stays.
        keeps_recomputed: True for its second half: recomputed tensors stay until the block is done.
    """

    def __init__(self, block: BlockTensors, keeps_saved: bool = False, keeps_recomputed: bool = False) -> None:
        self.now, self.peak = 0.0, Peak(0.0)
        self.keeps_saved, self._keeps_recomputed = keeps_saved, keeps_recomputed
        self._replaceable = 0.0
        self._block, self._saved, self._alive = block, block.saved, dict(block.saved)
        self._steps = dict(block.recomputed)  # not run again yet
        self._waiting: dict[str, set[str]] = {}  # by step that ran again: its tensors that are still to be unpacked

    def add(self, *sizes: float) -> None:
        """Allocate tensors."""
        self.now += sum(sizes)
        if self.now > self.peak.total:
            recomputed = sum(size for name, size in self._alive.items() if name not in self._saved)
            self.peak = Peak(self.now, recomputed)

    def free(self, *tensors: float | str) -> None:
        """Free tensors: by size, or by name those that the forward pass saved or that were recomputed.

        All tensors of a recomputed step are freed with the last of them.
        """
        for tensor in tensors:
            if not isinstance(tensor, str):
                self.now -= tensor
            elif tensor in self._saved:
                self.now -= 0.0 if self.keeps_saved else self._alive.pop(tensor, 0.0)
            else:
                self._unpack(tensor)

    def free_copy(self, name: str, share: float, last: bool) -> None:
        """Free the cast copy of a weight, a share of those of this name; if they are recomputed, all with the last."""
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
        """Allocate tensors together, and free them."""
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
