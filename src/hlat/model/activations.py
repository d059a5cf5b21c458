"""Activation memory: bytes saved for backward, tensor by tensor, and which of these tensors can be recomputed.

    model section, micro-batch, precision mode, rank workload, recomputed steps --activation_bytes--> ActivationBytes

The numbers count this implementation; they are no formula from the literature. Pointwise functions save what
``pointwise.py`` lists, fused attention saves its inputs, its output and one log-sum-exp per row, a linear layer saves
its input, and the loss saves the gradients of its inputs. A tensor saved by two consumers is counted once. All have the
dtype of the activations, except for norm statistics and log-sum-exp (fp32). If the weights are stored in another dtype,
a cast copy of each stays alive until backward.

With T tensor-parallel and C context-parallel ranks, a rank has 1 / C of the positions and 1 / T of the heads and
intermediate columns. With sequence parallelism the tensors between blocks ("x", "residual" and the scales of their
norms) are sharded over the T ranks too. The inputs of attention and feed-forward are unsharded all the same: they are
saved as gathered. (Korthikanti et al. 2022, section 4.2.2, gather them again in backward; here that is to recompute
them.)
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from hlat.config import ModelConfig
from hlat.model.architectures import model_spec
from hlat.model.spec import (
    FULL_MODEL,
    ModelShard,
    ModelSpec,
    SavedTensor,
    axis_range,
    local_elements,
    shard_heads,
    vocabulary_rows,
)
from hlat.precision import MODES

_FP32 = 4
_INT64 = 8


@dataclass(frozen=True)
class RankWorkload:
    """A rank's shard of the model and of the tokens, and what else decides its activation memory."""

    shard: ModelShard = field(default=FULL_MODEL)  # layers, heads and columns
    sequence: bool = False  # tensors between blocks are sharded over the tensor-parallel ranks (sequence parallelism)
    context: int = 1  # context-parallel ranks
    # Weights are cast from their stored dtype to that of the activations; not if FSDP2 gathers them in the latter.
    weight_copies: bool = True
    materialised_masks: bool = False  # attention to positions of other ranks builds a mask, as on CPUs
    scores: bool = False  # attention keeps the scores of all pairs of positions, and repeats keys and values per head
    # Intra-document attention: no mask is built, the two chunks of a rank are one call, and every token has its own cos
    # and sin. With a sliding window it is computed likewise, but for cos and sin.
    isolated: bool = False


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes saved for backward by one micro-batch."""

    layer: dict[str, int]  # of one decoder block, by tensor. "x" is its input, "residual" the sum after attention.
    # Outside of the blocks, by tensor: token ids, the final norm, and the gradients of the loss by the head's input and
    # weight.
    ends: dict[str, int]
    layers: int  # number of blocks

    @property
    def per_layer(self) -> int:
        return sum(self.layer.values())

    @property
    def total(self) -> int:
        return self.layers * self.per_layer + sum(self.ends.values())


def activation_bytes(
    config: ModelConfig,
    batch: int,
    sequence_length: int,  # over all context-parallel ranks
    mode: str = "fp32",
    recomputed: Collection[str] = (),  # names of ``RECOMPUTABLE`` that every block recomputes
    workload: RankWorkload = RankWorkload(),
) -> ActivationBytes:
    """Count the bytes that a rank saves in a forward pass over ``batch`` complete sequences, loss included."""
    sizes = _Sizes.of(config, batch, sequence_length, mode, workload)
    return ActivationBytes(sizes.layer(frozenset(recomputed)), sizes.ends(), len(workload.shard.layer_range(config)))


@dataclass(frozen=True)
class _Sizes:
    """Sizes on a rank that bytes are computed from."""

    config: ModelConfig
    workload: RankWorkload
    batch: int
    length: int
    tokens: int  # of a micro-batch on the rank, inside of attention and feed-forward
    between: int  # the same between blocks: fewer with sequence parallelism
    item: int  # bytes of an activation element
    copied: int  # bytes of an element of a cast weight copy; 0 if weights are not copied
    stored: int  # bytes of a weight element as it reaches the module

    @classmethod
    def of(cls, config: ModelConfig, batch: int, length: int, mode: str, workload: RankWorkload) -> "_Sizes":
        item = MODES[mode].compute.itemsize
        stored = MODES[mode].weights.itemsize if workload.weight_copies else item
        tokens = batch * length // workload.context
        between = tokens // workload.shard.tensor_count if workload.sequence else tokens
        copied = item if item != stored else 0
        return cls(config, workload, batch, length, tokens, between, item, copied, stored)

    @property
    def by_document(self) -> float:
        """Share of the layers whose attention is computed by the kernel for documents and sliding windows."""
        windows, layers = self.config.windows(self.length), self.workload.shard.layer_range(self.config)
        always = self.workload.isolated or self.config.alters_softmax
        limited = sum(always or windows[index] is not None for index in layers)
        return limited / max(1, len(layers))

    def layer(self, recomputed: frozenset[str]) -> dict[str, int]:
        spec = model_spec(self.config)
        saved = {tensor.name: self._bytes(tensor, recomputed) for tensor in spec.saved}
        saved |= self._weight_copies(spec, recomputed)
        if self.workload.context > 1:
            saved |= self._context_tensors(recomputed)
        if self.workload.scores and not recomputed & {"attention_log_sum", "attention_output"}:
            saved |= self._scores()
        return {name: size for name, size in saved.items() if size}

    def _bytes(self, tensor: SavedTensor, recomputed: frozenset[str]) -> int:
        sharded = self.workload.sequence
        # Without sequence parallelism a gathered copy is the tensor itself, which is counted once.
        if recomputed.intersection(tensor.freed_by) or (tensor.gathers and not sharded):
            return 0
        if tensor.source_of and sharded and not recomputed.intersection(tensor.source_of):
            return 0
        ranges = [axis_range(self.config, self.workload.shard, axis).count for axis in tensor.axes]
        elements = sum(ranges) if tensor.axes else 1
        if tensor.statistics and tensor.axes:
            elements //= self.config.n_head_dim
        size = _FP32 if tensor.statistics else self.item
        return (self.between if tensor.between else self.tokens) * size * elements

    def _context_tensors(self, recomputed: frozenset[str]) -> dict[str, int]:
        """Bytes of tensors that context parallelism adds or replaces, by name."""
        config, here, ranks = self.config, shard_heads(self.config, self.workload.shard), self.workload.context
        local = self.tokens * self.item * here.kvs * config.n_head_dim
        # Local keys and values are saved only if they will be gathered again.
        again = bool(recomputed & {"attention_log_sum", "attention_output"})
        own = local * (again and "qkv" not in recomputed)
        found = {"k": own, "v": own, "gathered_keys_values": 2 * ranks * local * (not again)}
        if again:
            return found
        # Of the other layers only; a mean over all, so that every layer counts alike.
        share, chunk = 1 - self.by_document, self.length // (2 * ranks)
        return found | {
            "attention_chunks": round(share * self.tokens * self.item * here.queries * config.n_head_dim),
            # two chunks of queries attend to i + 1 and to 2 ranks - i chunks of keys
            "attention_masks": round(share * self.item * chunk * chunk * (2 * ranks + 1))
            * self.workload.materialised_masks,
        }

    def _scores(self) -> dict[str, int]:
        """Bytes that attention keeps where no fused kernel computes it: scores after softmax, repeated keys, values."""
        here, ranks = shard_heads(self.config, self.workload.shard), self.workload.context
        # with context parallelism of two chunks of queries, which attend to the prefixes that their masks are for
        queries = self.length // (2 * ranks) if ranks > 1 else self.length
        keys = queries * (2 * ranks + 1) if ranks > 1 else self.length
        repeated = 2 * keys * self.config.n_head_dim * (here.queries - (here.kvs if ranks == 1 else 0))
        size = self.batch * self.item
        return {"attention_scores": size * here.queries * queries * keys, "repeated_keys_values": size * repeated}

    def _weight_copies(self, spec: ModelSpec, recomputed: frozenset[str]) -> dict[str, int]:
        copies: dict[str, int] = {}
        for parameter in spec.block:
            for tensor in parameter.tensors:
                if parameter.freed_by not in recomputed and not tensor.is_bias:  # no gradient depends on a bias
                    name = f"{parameter.step}_weight_copy"
                    size = self.copied * local_elements(self.config, self.workload.shard, tensor)
                    copies[name] = copies.get(name, 0) + size
        return copies

    def ends(self) -> dict[str, int]:
        config, shard = self.config, self.workload.shard
        width, ends = config.hidden_size, {}
        if shard.embedding:
            # With a sharded vocabulary: shifted ids (int64), and a mask of the ids of other ranks (1 byte).
            ends["token_ids"] = self.tokens * (8 if shard.has_full_layers else 9)
        if self.by_document:
            ends["document_starts"] = self.tokens * _INT64
        # Tables are made for this pass if each token has its own, or if the rank's positions are two ranges.
        rows = self.tokens if self.workload.isolated else self.length // self.workload.context
        if self.workload.isolated or self.workload.context > 1:
            kinds = (config.layer_kind(index) for index in shard.layer_range(config))
            ropes = {kind.rope for kind in kinds if kind.rope is not None}
            ends["rotation_tables"] = rows * _FP32 * sum(rope.width(config.n_head_dim) for rope in ropes)
        if shard.head:
            ends["final_norm"] = self.between * (self.item * width + _FP32) + self.copied * width
            ends["loss_by_hidden"] = self.tokens * self.item * width
            ends["loss_by_head"] = self.stored * len(vocabulary_rows(config, shard)) * width
        return ends
