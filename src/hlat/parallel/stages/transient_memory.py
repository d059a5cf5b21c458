"""Transient memory of a rank (gradients, activations, logits, buffers) at the instants of a step where it can peak.

    sizes of tensors (transient_sizes.py), passes in flight (in_flight.py)
        -> loss | backward of the loss | of the first block | of the last | of the embedding | communication | optimizer
        -> bytes of gradients, activations, recomputing, logits, working, buffers

While the optimizer updates whole matrices, the tensors of the exchange and of the update are counted. An optimizer that
updates every element on its own needs no memory besides its state (``optim/adamw.py``).

Tests compare the result with rehearsals and real processes (tests/distributed/memory/test_planned.py).
"""

from functools import lru_cache

from hlat.config import ParallelConfig, Schedule
from hlat.model import ModelShard, block_share, parameter_layouts
from hlat.optim import optimizer_spec
from hlat.parallel.layout import Layout, StepShape
from hlat.parallel.matrix_exchange import MatrixPlan, matrix_shapes
from hlat.parallel.process_groups import BUCKET_BYTES
from hlat.parallel.stages.backward_memory import Peak
from hlat.parallel.stages.in_flight import Instant, peak_instants, replayed
from hlat.parallel.stages.transient_sizes import ACCELERATOR, EagerKernels, TransientSizes, transient_sizes
from hlat.precision import MODES

# Bytes by name; missing names are 0. "parameters" is negative: those within a step that are freed by then.
Bytes = dict[str, float]


def transient_bytes(
    step: StepShape,
    pipeline_rank: int,
    sizes: tuple[float, ...],
    ends: tuple[bool, bool],
    gradients: float,
    kernels: EagerKernels = ACCELERATOR,
) -> list[Bytes]:
    """Compute transient bytes by name, for each instant at which memory can peak; see ``transient_sizes``."""
    instants = _instants(step, pipeline_rank, sizes)
    rank = transient_sizes(step, sum(sizes), ends, gradients, kernels)
    if step.budget is not None:
        alive = max((now.alive for now in instants if now.alive), default=1)
        rank = _within_budget(rank, step.budget / alive, sum(sizes) / step.virtual)
    if step.layout.pipeline == 1:
        found = _single_stage(step, rank, sum(sizes))
    else:
        found = [each for now in instants for each in _at(rank, now)]
        if step.sharded:  # FSDP2 reduces the gradients of the rank at the end of the step
            reduced = max(rank.block_reduced, rank.end_reduced)
            found.append({"gradients": rank.gradients * step.virtual, "buffers": reduced})
    if not step.sharded and step.layout.data * step.layout.context > 1:
        found.append({"gradients": gradients, "buffers": min(gradients, max(BUCKET_BYTES, rank.largest_gradient))})
    return found + optimizer_instant(step, sum(sizes), ends)


def _within_budget(rank: TransientSizes, most: float, layers: float) -> TransientSizes:
    """Limit the activations of a pass over ``layers`` layers to ``most`` bytes, and those of a layer to its share."""
    per_pass = min(rank.per_pass, most)
    return rank._replace(per_pass=per_pass, per_layer=min(rank.per_layer, max(0.0, per_pass - rank.at_entry) / layers))


def _single_stage(step: StepShape, rank: TransientSizes, layers: float) -> list[Bytes]:
    """Transient bytes by name at the instants of a step without a pipeline."""
    several = step.micro_batches > 1
    # The first of several micro-batches leaves its gradients to the last, whose blocks begin with all of them.
    before = rank.gradients if several else 0.0
    blocks, norm = rank.per_pass, rank.final_norm
    # FSDP2 keeps the buffer of its last gather until the next, and gathers the next block in advance.
    last_gather = rank.block_gather if step.layout.zero == 3 or not several else 0.0
    ahead = 2 * rank.gathered
    # Of a head that is gathered apart after its reduction, unless an earlier micro-batch has made it.
    head = (0.0 if several else rank.end_gradient) if rank.head_freed else rank.head_gradient
    first = {
        "parameters": -rank.head_freed,
        "gradients": before + head,
        "activations": blocks,
        **_in_block(rank.block.whole),
        "buffers": ahead,
    }
    found: list[Bytes] = [
        {"gradients": before, "activations": blocks, "working": rank.block.forward, "buffers": ahead},
        {
            "gradients": before,
            "activations": blocks + norm,
            "logits": rank.loss or 0.0,
            "buffers": 0.0 if rank.head_freed else last_gather,
        },
        {"gradients": before, "activations": blocks + norm + rank.by_loss, "logits": rank.loss_backward},
        {"gradients": before + rank.head_gradient, "activations": blocks + norm, "working": rank.norm},
        first,
    ]
    if rank.head_freed:
        found += _head_reduction(rank, before, first)
    if step.sharded:
        found += _second_block(step, rank, first)
    if not several:
        found += _last_block(step, rank, layers)
    elif rank.head_waits:  # of a tied matrix: its gradients by head and embedding, and their sum
        found.append({"gradients": before, "activations": rank.at_entry, "working": 3 * rank.head_gradient})
    if step.sharded:
        accumulated = layers * rank.block_gradient if step.layout.zero == 1 and several else 0.0
        freed = rank.end_kept + (0.0 if step.layout.zero == 3 else layers * rank.block_gather)
        found.append(
            {
                "parameters": -freed,
                "gradients": rank.gradients - accumulated + rank.end_kept,
                "buffers": rank.end_reduced,
            }
        )
        if step.layout.zero == 2 and several:
            # Earlier micro-batches reduce theirs too, and keep what they gathered; the first has no others at the ends.
            blocks = layers * rank.block_gradient
            made = rank.gradients if step.micro_batches > 2 else blocks
            # Their sums are allocated when of head and embedding one gradient is left.
            last = rank.end_kept if rank.head_waits else rank.end_kept / 2
            found += [
                {"gradients": made, "working": rank.end_kept, "buffers": rank.end_reduced},
                {"gradients": made + rank.gradients - blocks, "working": last, "buffers": rank.end_reduced},
            ]
    return found


def _head_reduction(rank: TransientSizes, before: float, first: Bytes) -> list[Bytes]:
    """Bytes while a head that is gathered apart is reduced, and in the block after it."""
    return [
        {
            "parameters": -rank.head_freed,
            "gradients": before + rank.end_kept,
            "activations": first["activations"],
            "working": rank.message,
            "buffers": rank.end_reduced + rank.gathered,
        },
        {**first, "buffers": first["buffers"] + rank.end_reduced},
    ]


def _second_block(step: StepShape, rank: TransientSizes, first: Bytes) -> list[Bytes]:
    """Bytes after the first block has run backward (``first``), whose gradients FSDP2 reduces."""
    second = {
        **first,
        "activations": first["activations"] - rank.per_layer,
        "buffers": first["buffers"] + rank.block_reduced,
    }
    kept = {**second, "gradients": first["gradients"] + rank.block_kept, "working": 0.0, "recomputing": 0.0}
    if step.micro_batches == 1:  # gradients of earlier micro-batches would be complete
        second["gradients"] += rank.block_gradient
    if step.layout.zero == 3 or step.micro_batches > 2:
        return [second, kept]
    # The last micro-batch frees each block's gathered parameters; the first one has gradients of one block only.
    earlier = {**second, "gradients": rank.block_gradient + rank.head_gradient}
    freed = -rank.block_gather
    return [{**second, "parameters": freed}, {**kept, "parameters": freed}, earlier][: 1 + step.micro_batches]


def _last_block(step: StepShape, rank: TransientSizes, layers: float) -> list[Bytes]:
    """Bytes when the first block runs backward, with all gradients but its own."""
    made = rank.gradients - rank.end_gradient - rank.block_gradient
    freed = (layers - 1) * rank.block_gather if step.sharded and step.layout.zero < 3 else rank.head_freed
    # If not sharded, or reduced already, the head's gradient is among the others.
    head = rank.head_gradient if (step.sharded and not rank.head_freed) or rank.head_waits else 0.0
    return [
        {
            "parameters": -freed,
            "gradients": made + head,
            "activations": rank.per_layer + rank.at_entry,
            **_in_block(rank.block.whole),
            "buffers": rank.gathered + rank.block_reduced,
        },
        {
            "parameters": -freed,
            "gradients": made + rank.block_gradient + head,
            "activations": rank.at_entry,
            "working": rank.embedding or 0.0,
            "buffers": rank.block_reduced,
        },
    ]


def _at(rank: TransientSizes, now: Instant) -> list[Bytes]:
    """Bytes at an instant of a pipeline; several sets if any may be largest."""
    blocks, buffers = now.alive * rank.per_pass, now.messages * rank.message
    common: Bytes = {"gradients": now.stages * rank.gradients, "activations": blocks, "buffers": buffers}
    if now.alive == 0:
        return [common]
    if not now.forward:
        return _in_backward(rank, now, common)
    saved = blocks + now.last * (rank.final_norm + rank.by_loss)
    running = {**common, "activations": saved, "working": _waiting(rank, now) + rank.block.forward}
    return [running, *(_at_loss(rank, now, common) if now.stage == rank.virtual - 1 else [])]


def _in_backward(rank: TransientSizes, now: Instant, common: Bytes) -> list[Bytes]:
    """Bytes in a backward pass of a pipeline stage."""
    waiting, split = _waiting(rank, now), now.waiting > now.earlier
    # Gradients of the loss stay for the second half of a split pass; an unsplit pass has freed its own.
    heads = now.last if now.waiting else now.last - (now.stage == rank.virtual - 1)
    saved = common["activations"] + max(0, heads) * (rank.final_norm + rank.by_loss)
    running = {**common, "gradients": common["gradients"] + _head_gradient(rank, now), "activations": saved}
    in_block = (
        _in_block(rank.block.by_inputs, waiting - rank.split_layer) if split else _in_block(rank.block.whole, waiting)
    )
    found = [{**running, **in_block, "buffers": common["buffers"] + 2 * rank.gathered}]
    if now.waiting:
        found.append({**running, **_in_block(rank.block.by_weights, waiting)})
    if rank.embedding is not None and now.stage == 0:
        found.append({**common, "activations": saved - rank.per_pass, "working": waiting + rank.embedding})
    return found


def _in_block(peak: Peak, others: float = 0.0) -> Bytes:
    """Temporary bytes by name while a block runs backward; ``others`` are kept from earlier passes."""
    return {"working": others + peak.total - peak.recomputed, "recomputing": peak.recomputed}


def _head_gradient(rank: TransientSizes, now: Instant) -> float:
    return rank.head_gradient if now.stages else rank.first_head_gradient


def _waiting(rank: TransientSizes, now: Instant) -> float:
    """Bytes kept for weight gradients that are not computed yet."""
    return (
        now.waiting * rank.split_pass + now.waiting_received * rank.split_received + now.last_waiting * rank.split_norm
    )


def _at_loss(rank: TransientSizes, now: Instant, common: Bytes) -> list[Bytes]:
    """Bytes at the loss of a micro-batch in a pipeline, and in the loss's backward pass."""
    if rank.loss is None:
        return []
    waiting, saved = _waiting(rank, now), common["activations"] + now.last * rank.final_norm
    others = saved + (now.last - 1) * rank.by_loss
    return [
        {
            **common,
            "activations": others,
            "logits": rank.loss,
            "working": waiting,
            "buffers": common["buffers"] + rank.last_gather,
        },
        {**common, "activations": others + rank.by_loss, "logits": rank.loss_backward, "working": waiting},
        {
            **common,
            "gradients": common["gradients"] + _head_gradient(rank, now),
            "activations": others,
            "working": waiting + rank.norm,
        },
    ]


def _instants(step: StepShape, pipeline_rank: int, sizes: tuple[float, ...]) -> tuple[Instant, ...]:
    ranks, schedule = step.layout.pipeline, step.parallel.schedule
    if ranks == 1:
        return ()
    sends = _sends(schedule, ranks, step.virtual, pipeline_rank)
    # Only proportions of the sizes count: equal ones share an entry of the cache.
    even = (1.0,) * len(sizes) if len(set(sizes)) == 1 else sizes
    count = replayed(schedule, ranks, step.micro_batches)
    return peak_instants(schedule, pipeline_rank, ranks, count, sends, even)


@lru_cache(maxsize=4096)
def _sends(schedule: Schedule, ranks: int, each: int, pipeline_rank: int) -> tuple[tuple[bool, bool], ...]:
    """Pairs for the stages of a rank: sends activations, sends gradients, to another rank."""
    config = ParallelConfig(pipeline=ranks, schedule=schedule, virtual_stages=each)
    stages = Layout.of(config, ranks).remote_neighbour_stages(pipeline_rank)
    return tuple((stage + 1 in others, stage - 1 in others) for stage, others in stages)


def optimizer_instant(step: StepShape, layers: float, ends: tuple[bool, bool]) -> list[dict[str, float]]:
    """Compute the transient bytes by name while the optimizer updates a batch of matrices; none if it has no such."""
    if optimizer_spec(step.optimizer, step.mode).matrix_dtype is None:
        return []
    model, mode = step.model, MODES[step.mode]
    matrices = 1 if model.tie_embeddings and all(ends) else sum(ends)
    at_ends = matrices * model.vocab_size * model.hidden_size / step.layout.tensor
    elements = layers * block_share(model, step.layout.tensor) + at_ends
    gathered = (at_ends if step.layout.zero == 3 else elements) * mode.compute.itemsize if step.sharded else 0.0
    # Parameters gathered by FSDP2 are freed by then, but counted by the callers.
    working = max(0.0, _working(step, max(1, round(layers))) - gathered)
    return [{"gradients": elements / step.shards * mode.gradients.itemsize, "working": working}]


@lru_cache(maxsize=1024)
def _working(step: StepShape, layers: int) -> float:
    """Peak bytes of temporary tensors while a batch of hidden matrices, the first, is updated."""
    spec, plan = optimizer_spec(step.optimizer, step.mode), MatrixPlan(step, 0, range(layers))
    assert spec.matrix_dtype is not None, "the caller checked this"
    # As if rows and columns divided evenly; in the order of the tensors in MatrixExchange.transform.
    item, layout, batch = spec.matrix_dtype.itemsize, step.layout, plan.batches[0]
    stored = {
        name: each.rows * each.columns[0] / step.shards
        for name, each in parameter_layouts(step.model, ModelShard(0, layout.tensor, range(1), False, False)).items()
        if each.is_hidden_matrix
    }
    owned = [(each.rows, each.columns) for each in plan.matrices(batch) if each.owner == 0]
    largest = max(stored.values())
    if len(plan.members) == 1:  # one parameter at a time, and a copy of one of its matrices
        shapes = [shape for _, _, shape in matrix_shapes(step.model, 0)]
        function = max(rows * columns * item + spec.matrix_bytes(rows, columns) for rows, columns in shapes)
        return largest * item + max(function, spec.element_bytes(round(largest)))
    local = len(batch) * sum(stored.values()) * item
    whole = sum(rows * columns for rows, columns in owned) * item
    function = max((spec.matrix_bytes(*shape) for shape in owned), default=0.0)
    copies = layout.replicas if step.sharded else layout.data * layout.context
    exchanged = (local / copies + whole, 2 * whole, whole + function, (1 + copies) * whole, copies * whole + local)
    return local + max(*exchanged, spec.element_bytes(round(largest)))
