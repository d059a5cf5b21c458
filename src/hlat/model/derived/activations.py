"""What the forward pass keeps for the backward pass, tensor by tensor, and what of it can be recomputed.

This is our implementation counted, not a formula from the literature: the pointwise functions keep what ``ops.py``
says, fused attention keeps its inputs, its output and one log-sum per row, a linear layer keeps its input, the loss the
gradients of what enters it. A tensor kept by two consumers is counted once. Everything has the dtype of the
activations, but statistics and log-sums, which are fp32; where the weights are stored in another dtype, a copy of each
lives until backward.

With T tensor-parallel and C context-parallel ranks a rank has 1 / C of the positions and 1 / T of heads and inner
columns. What lies between blocks ("x", "residual" and their norms' scales) is sharded over the T ranks too with
sequence parallelism; the inputs of the two halves are whole in any case, since they are kept as gathered (Korthikanti
et al. 2022, section 4.2.2, gather them again: that is to recompute them).
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from hlat.config.sections import ModelConfig
from hlat.model.model_shard import FULL_MODEL, ModelShard, intermediate_columns, shard_heads, vocabulary_rows
from hlat.precision import MODES

_FP32 = 4
_INT64 = 8

RECOMPUTABLE: dict[str, tuple[str, ...]] = {
    "attention_input": ("attention_input", "attention_norm_scale", "attention_norm_weight_copy"),
    "qkv": ("q", "k", "v", "qk_norm_input", "qk_norm_scale", "qk_norm_weight_copy", "qkv_weight_copy"),
    "attention_log_sum": ("attention_log_sum", "gathered_keys_values", "attention_chunks", "attention_masks"),
    "attention_output": (
        "attention_output",
        "attention_log_sum",
        "gathered_keys_values",
        "attention_chunks",
        "attention_masks",
    ),
    "residual": ("residual", "output_weight_copy"),
    "feed_forward_input": ("feed_forward_input", "feed_forward_norm_scale", "feed_forward_norm_weight_copy"),
    "gate_up": ("gate_up", "gate_up_weight_copy"),
    "inner": ("inner",),
    "down_weight_copy": ("down_weight_copy",),
}
"""What a block may recompute, and the tensors that are then not kept: all but what enters it, "x"."""


@dataclass(frozen=True)
class RankWorkload:
    """What a rank has of a model and of the tokens.

    Attributes:
        part: its layers, heads and columns.
        sequence: whether what lies between blocks is sharded over the tensor-parallel ranks.
        context: context-parallel ranks.
        weight_copies: whether weights come in the dtype that they are stored in, and are copied to that of the
            activations: not where FSDP2 gathers them in it.
        materialised_masks: whether attention to the positions of other ranks builds a mask, as on CPUs.
        isolated: whether documents see only themselves: no mask is built, a rank's chunks are one call, and every token
            has rotations of its own.
    """

    shard: ModelShard = field(default=FULL_MODEL)
    sequence: bool = False
    context: int = 1
    weight_copies: bool = True
    materialised_masks: bool = False
    isolated: bool = False


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes kept for backward by one micro-batch.

    Attributes:
        layer: of one decoder block, by tensor; "x" names what enters and "residual" what leaves its attention half.
        ends: of what is not in a block, by tensor: token ids, the final norm, and the loss's gradients by the head's
            input and by the head's weight.
        layers: number of blocks.
    """

    layer: dict[str, int]
    ends: dict[str, int]
    layers: int

    @property
    def per_layer(self) -> int:
        """Bytes of one block."""
        return sum(self.layer.values())

    @property
    def total(self) -> int:
        """Bytes of all blocks and the ends."""
        return self.layers * self.per_layer + sum(self.ends.values())


def activation_bytes(
    config: ModelConfig,
    batch: int,
    sequence_length: int,
    mode: str = "fp32",
    recomputed: Collection[str] = (),
    workload: RankWorkload = RankWorkload(),
) -> ActivationBytes:
    """Bytes kept by a forward pass over ``batch`` sequences of ``sequence_length`` tokens on one device, loss included.

    Args:
        mode: of precision.
        recomputed: names of ``RECOMPUTABLE``, in every block.
        share: of the rank.
    """
    sizes = _Sizes.of(config, batch, sequence_length, mode, workload)
    return ActivationBytes(sizes.layer(frozenset(recomputed)), sizes.ends(), len(workload.shard.layer_range(config)))


@dataclass(frozen=True)
class _Sizes:
    """Sizes on a rank: positions with and without sequence parallelism, and widths."""

    config: ModelConfig
    workload: RankWorkload
    batch: int
    length: int
    tokens: int
    between: int
    item: int
    copied: int  # bytes of a copied weight element; 0 where there are no copies
    stored: int  # bytes of a weight element as it comes

    @classmethod
    def of(cls, config: ModelConfig, batch: int, length: int, mode: str, workload: RankWorkload) -> "_Sizes":
        item = MODES[mode].compute.itemsize
        stored = MODES[mode].weights.itemsize if workload.weight_copies else item
        tokens = batch * length // workload.context
        between = tokens // workload.shard.tensor_count if workload.sequence else tokens
        copied = item if item != stored else 0
        return cls(config, workload, batch, length, tokens, between, item, copied, stored)

    def layer(self, recomputed: frozenset[str]) -> dict[str, int]:
        """Bytes of one block by tensor, those that are kept."""
        freed = {tensor for name in recomputed for tensor in RECOMPUTABLE[name]}
        kept = {**self._tensors(), **self._weight_copies()}
        if self.workload.context > 1:
            kept |= self._context_tensors(recomputed)
        return {name: size for name, size in kept.items() if size and name not in freed}

    def _tensors(self) -> dict[str, int]:
        config, item, here = self.config, self.item, shard_heads(self.config, self.workload.shard)
        width, head, inner = (
            config.hidden_size,
            config.n_head_dim,
            len(intermediate_columns(config, self.workload.shard)),
        )
        kept = {
            "x": self.between * item * width,
            "attention_norm_scale": self.between * _FP32,
            "attention_input": self.tokens * item * width,
            "q": self.tokens * item * here.queries * head,
            "k": self.tokens * item * here.kvs * head,
            "v": self.tokens * item * here.kvs * head,
            "attention_output": self.tokens * item * here.queries * head,
            "attention_log_sum": self.tokens * _FP32 * here.queries,
            "residual": self.between * item * width,
            "feed_forward_norm_scale": self.between * _FP32,
            "feed_forward_input": self.tokens * item * width,
            "gate_up": self.tokens * item * 2 * inner,
            "inner": self.tokens * item * inner,
        }
        if config.qk_norm:
            # The norms keep their inputs; fused, these are slices that keep the whole projection alive.
            projected = here.queries + (2 if config.coalesce else 1) * here.kvs
            kept["qk_norm_input"] = self.tokens * item * projected * head
            kept["qk_norm_scale"] = self.tokens * _FP32 * (here.queries + here.kvs)
        return kept

    def _context_tensors(self, recomputed: frozenset[str]) -> dict[str, int]:
        """What attention to the positions of other ranks keeps, and no longer keeps."""
        config, here, ranks = self.config, shard_heads(self.config, self.workload.shard), self.workload.context
        local = self.tokens * self.item * here.kvs * config.n_head_dim
        # Its own keys and values are kept for gathering them again only.
        again = bool(recomputed & {"attention_log_sum", "attention_output"})
        gathered = {"k": local * again, "v": local * again, "gathered_keys_values": 2 * ranks * local}
        if self.workload.isolated:
            return gathered
        chunk = self.length // (2 * ranks)
        return gathered | {
            "attention_chunks": self.tokens * self.item * here.queries * config.n_head_dim,
            # of two chunks, to the i + 1 and 2 ranks - i chunks up to them
            "attention_masks": self.item * chunk * chunk * (2 * ranks + 1) * self.workload.materialised_masks,
        }

    def _weight_copies(self) -> dict[str, int]:
        config, here = self.config, shard_heads(self.config, self.workload.shard)
        width, head, inner = (
            config.hidden_size,
            config.n_head_dim,
            len(intermediate_columns(config, self.workload.shard)),
        )
        elements = {
            "attention_norm": width,
            "qk_norm": 2 * head if config.qk_norm else 0,
            "qkv": (here.queries + 2 * here.kvs) * head * width,
            "output": here.queries * head * width,
            "feed_forward_norm": width,
            "gate_up": 2 * inner * width,
            "down": inner * width,
        }
        return {f"{name}_weight_copy": self.copied * count for name, count in elements.items()}

    def ends(self) -> dict[str, int]:
        """Bytes of what is not in a block, by tensor."""
        config, shard = self.config, self.workload.shard
        width, ends = config.hidden_size, {}
        if shard.embedding:
            # Cut by vocabulary: ids of the rows that are here, and which they are.
            ends["token_ids"] = self.tokens * (8 if shard.has_full_layers else 9)
        if self.workload.isolated:
            ends["rotation_tables"] = self.tokens * config.n_head_dim * _FP32
            ends["document_starts"] = self.tokens * _INT64
        elif self.workload.context > 1:
            # Of positions that are not one run: put together for this pass.
            ends["rotation_tables"] = self.length // self.workload.context * config.n_head_dim * _FP32
        if shard.head:
            ends["final_norm"] = self.between * (self.item * width + _FP32) + self.copied * width
            ends["loss_by_hidden"] = self.tokens * self.item * width
            ends["loss_by_head"] = self.stored * len(vocabulary_rows(config, shard)) * width
        return ends
