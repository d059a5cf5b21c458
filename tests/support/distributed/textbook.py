"""Expected messages of a rank in a step: the counts of the literature, and the differences of hlat with their reasons.

    recipe, world, rank -> Messages ... (kind, count, bytes of each)

Notation of the sources: b sequences per micro-batch, s tokens of a sequence, h width, L layers, Psi parameters; M
micro-batches of a step. Numbers are fp32, of four bytes. A message that no source mentions has source None; one that a
source counts but hlat does not send has a negative count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hlat.config import Recipe
from hlat.model.counts import count_parameters
from hlat.parallel.layout import Layout, StepShape
from hlat.parallel.stages.stage_layers import stage_layers
from tests.support.distributed.traffic import MICRO_BATCHES as M
from tests.support.distributed.traffic import Traffic

_FP32 = 4
_PAIR = 8  # bytes of two fp32 scalars
_COUNT = 4  # of an int32

MEGATRON = "Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2"
PIPELINE = "Narayanan et al. 2021, section 3.2"
ZERO = "Rajbhandari et al. 2020, section 7"
HYBRID = "Zhao et al. 2023, section 3.2.2"
CONTEXT = "Grattafiori et al. 2024, section 3.3.2"


@dataclass(frozen=True)
class Messages:
    """Equal messages of a rank in a step."""

    what: str
    kind: str
    count: int
    bytes: int
    source: str | None


def expected(recipe: Recipe, world: int, rank: int) -> list[Messages]:
    """Iterate over all expected messages of a rank."""
    layout = Layout.of(recipe.parallel, world)
    stage = _RankLayers.of(recipe, layout, rank)
    found = [*_bookkeeping(layout)]
    if layout.tensor > 1:
        found += _tensor(recipe, layout, stage)
    if layout.context > 1:
        found += _context(recipe, stage)
    if layout.pipeline > 1:
        found += _pipeline(recipe, layout, stage)
    if layout.data * layout.context > 1:
        found += _zero(recipe, layout, stage)
    return found


def total(messages: list[Messages]) -> Traffic:
    """Count messages by kind and size."""
    traffic: Traffic = Traffic()
    for one in messages:
        traffic[one.kind, one.bytes] += one.count
    return +traffic


@dataclass(frozen=True)
class _RankLayers:
    """Layers and coordinates of a rank."""

    layers: int
    first: bool
    last: bool

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout, rank: int) -> "_RankLayers":
        layers = stage_layers(StepShape.of(recipe, layout.world))
        (index,) = layout.stages_of(layout.coordinates(rank).pp)
        return cls(len(layers[index]), index == 0, index == len(layers) - 1)


def _bookkeeping(layout: Layout) -> Iterator[Messages]:
    # Every rank needs the norm over all parameters before clipping; the loss is sent with it.
    yield Messages("loss and gradient norm, over the world", "all_reduce", 1, _PAIR, None)
    if layout.data > 1:
        # Sequences have different numbers of labels, so the mean loss is not the mean of the ranks' means.
        yield Messages("labels of the global batch", "all_reduce", 1, _COUNT, None)


def _tensor(recipe: Recipe, layout: Layout, stage: _RankLayers) -> Iterator[Messages]:
    h, L, tokens = recipe.model.hidden_size, stage.layers, recipe.batch.micro_batch * recipe.data.sequence_length
    bsh = tokens * h * _FP32
    twice = recipe.memory.activation_checkpointing == "full"
    if layout.sequence_parallel:
        # g and g-bar of attention and feed-forward: each once forward, and as the other one backward. Section 4.2.2
        # adds a gather per column-parallel layer in backward, in exchange for not keeping the gathered input.
        yield Messages("blocks", "all_gather", 4 * L * M, bsh, MEGATRON)
        if not twice:
            yield Messages("inputs again", "all_gather", 2 * L * M, bsh, MEGATRON)
        yield Messages("blocks", "reduce_scatter", 4 * L * M, bsh, MEGATRON)
        if twice:
            # A recomputed forward pass has 2 + 2, but torch stops it when backward has all it needs: before the last.
            yield Messages("blocks again", "all_gather", 2 * L * M, bsh, MEGATRON)
            yield Messages("blocks again", "reduce_scatter", 2 * L * M, bsh, MEGATRON)
            yield Messages("last of blocks again, not needed", "reduce_scatter", -L * M, bsh, None)
        if stage.first:
            yield Messages("embedding, forward", "reduce_scatter", M, bsh, MEGATRON)
            yield Messages("embedding, backward", "all_gather", M, bsh, MEGATRON)
        if stage.last:
            yield Messages("head, forward", "all_gather", M, bsh, MEGATRON)
            yield Messages("head, backward", "reduce_scatter", M, bsh, MEGATRON)
        # Each rank has the term of its shard of the sequence: Megatron-LM's code sums norm gradients as well.
        norms = 2 * L + (1 if stage.last else 0)
        yield Messages("gradients of the norms", "all_reduce", 1, norms * h * _FP32, None)
    else:
        yield Messages("blocks", "all_reduce", 4 * L * M, bsh, MEGATRON)
        if stage.first:
            yield Messages("embedding, forward", "all_reduce", M, bsh, MEGATRON)
        if stage.last:
            yield Messages("head, backward", "all_reduce", M, bsh, MEGATRON)
    if stage.last:
        # Megatron-LM sends the same three numbers per token, in three all-reduces: maximum, label's logit and sum.
        yield Messages("loss: maxima of the logits", "all_reduce", M, tokens * _FP32, MEGATRON)
        yield Messages("loss: sums and logits of labels", "all_reduce", M, 2 * tokens * _FP32, MEGATRON)


def _context(recipe: Recipe, stage: _RankLayers) -> Iterator[Messages]:
    model, tokens = recipe.model, recipe.batch.micro_batch * recipe.data.sequence_length
    keys_and_values = 2 * tokens * model.n_kv_heads * model.n_head_dim * _FP32
    yield Messages("keys and values", "all_gather", stage.layers * M, keys_and_values, CONTEXT)
    yield Messages("gradients of keys and values", "reduce_scatter", stage.layers * M, keys_and_values, CONTEXT)


def _pipeline(recipe: Recipe, layout: Layout, stage: _RankLayers) -> Iterator[Messages]:
    # One activation down and one gradient up per micro-batch and boundary. Under sequence parallelism the residual
    # stream is sharded, and so are these messages: the scatter and gather of section 4.1 would save nothing more.
    shards = layout.tensor if layout.sequence_parallel else 1
    size = recipe.batch.micro_batch * recipe.data.sequence_length * recipe.model.hidden_size * _FP32 // shards
    boundaries = (not stage.first) + (not stage.last)
    yield Messages("activations and their gradients", "send", boundaries * M, size, PIPELINE)
    yield Messages("activations and their gradients", "receive", boundaries * M, size, PIPELINE)


def _zero(recipe: Recipe, layout: Layout, stage: _RankLayers) -> Iterator[Messages]:
    psi = count_parameters(recipe.model)
    block = (psi.total - psi.embedding - psi.head - recipe.model.hidden_size) // recipe.model.layers * _FP32
    embedding = psi.embedding * stage.first * _FP32
    head = (psi.head + recipe.model.hidden_size) * stage.last * _FP32
    apart = layout.zero == 3 and layout.pipeline == 1
    # What FSDP2 gathers or reduces in one message. At ZeRO 3 the embedding and the head are freed after their use.
    units = [(stage.layers, block), *([(1, embedding), (1, head)] if apart else [(1, embedding + head)])]
    if layout.zero == 0:
        # 2 Psi: an all-reduce sends each element twice. Accumulation is local, so once per step.
        yield Messages("gradients", "all_reduce", 1, sum(n * size for n, size in units), ZERO)
        return
    # A pipeline reduces once, after its last micro-batch, at every stage.
    reductions = M if layout.zero >= 2 and layout.pipeline == 1 else 1
    for number, size in units:
        if layout.zero == 3:
            # 3 Psi per micro-batch: parameters once forward and once backward, gradients once.
            yield Messages("parameters", "all_gather", 2 * number * M, size, ZERO)
        else:
            # 2 Psi without accumulation. Gathered parameters stay for all micro-batches of the step; at ZeRO 2 the
            # unsharded gradients do not, so that each micro-batch reduces its own.
            yield Messages("parameters", "all_gather", number, size, ZERO)
        yield Messages("gradients", "reduce_scatter", number * reductions, size, ZERO)
        if layout.replicas > 1:
            shard = size // (layout.data // layout.replicas * layout.context)
            # A replica accumulates its shards over the micro-batches, and sends the sum.
            yield Messages("gradients, over replicas", "all_reduce", number, shard, HYBRID)
    if layout.zero == 3:
        # Norm and head stay gathered until their backward pass, which comes next; a lookup's backward pass needs no
        # weights. In a pipeline embedding or head are used first or last in both directions.
        for size in (embedding, head) if apart else (embedding + head,):
            yield Messages("embedding, norm, head: backward", "all_gather", -M, size, None)


def table(counted: dict[str, list[tuple[Traffic, list[Messages]]]]) -> str:
    """Format a Markdown table of measured and expected messages: a line per row, ranks and kind.

    Args:
        counted: by the name of a row, measured and expected messages of each rank.
    """
    lines = [
        "| layout | ranks | kind | messages | bytes | textbook: messages | bytes | besides the textbook |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ranks in counted.items():
        cells = ["\n".join(_kinds(traffic, messages)) for traffic, messages in ranks]
        for cell in dict.fromkeys(cells):
            which = ", ".join(str(rank) for rank, other in enumerate(cells) if other == cell)
            lines += [f"| {name} | {which} | {line} |" for line in cell.splitlines()]
    return "\n".join(lines)


def _kinds(traffic: Traffic, messages: list[Messages]) -> Iterator[str]:
    for kind in sorted({kind for kind, _ in traffic}):
        book = [one for one in messages if one.kind == kind and one.source is not None]
        besides = [
            f"{one.what} {one.count:+d} x {one.bytes:,}" for one in messages if one.kind == kind and one not in book
        ]
        sizes = [(count, size) for (one, size), count in traffic.items() if one == kind]
        numbers = (
            sum(count for count, _ in sizes),
            sum(count * size for count, size in sizes),
            sum(one.count for one in book),
            sum(one.count * one.bytes for one in book),
        )
        yield " | ".join([kind, *(f"{number:,}" for number in numbers), "; ".join(besides)])
