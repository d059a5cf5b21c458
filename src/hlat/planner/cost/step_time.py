"""Time of a training step: by formulas, by simulation of its pipeline, and of its single operations.

    columns, constants -> compute_times, comm_times -> step_times -> StepTimes: thousands of layouts at once
    schedule, ranks, micro-batches, StageTimes -> the order of every rank -> simulate_pipeline -> Timeline: one layout
    one workload -> OperationTimes -> seconds of a matrix product, of a message, of attention in a layer

    stage = layers x (forward + backward + recomputed) + embedding or head
    step  = (m - 1) slowest stage + its own pass + (p - 1)/v mean stage + messages + data parallelism + optimizer

For equal stages this is Narayanan et al. 2021, section 2.2; for unequal ones, apart from the order of passes, the
result of the simulation. If backward is split, gradients of weights fill the bubble. What remains is (p - 1)/v times a
forward pass plus the excess of the input gradients' pass over the weight gradients' (Qi et al. 2024), and part of the
backward pass is computed twice.

In the simulation, a pass starts when its rank is free and its input has arrived: for forward the output of the previous
stage, for backward the gradient from the next stage, for gradients of weights the input-gradient pass of the same
stage. Messages take time but do not occupy a rank, since they overlap with passes.

A rehearsal records the operations of a real step; OperationTimes has their times. Sizes of messages are nominal bytes:
16-bit elements count 2 bytes, and in fp32, where the rates of the device are halved, elements of 4 bytes count 2 as
well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from hlat.config import ZERO_BUBBLE, Schedule
from hlat.parallel import PassKind, PassOrder, pass_order
from hlat.planner.cost.calibration import Constants, load_constants
from hlat.planner.cost.comm_time import CommTimes, comm_times, hops
from hlat.planner.cost.compute_time import Products, compute_times, layer_products
from hlat.planner.cost.program import HLAT, Program
from hlat.planner.problem.workload import (
    RECOMPUTE_POLICIES,
    Column,
    WorkloadColumns,
    layer_weights,
    rank_weights,
)

_SELECTIVE, _FULL = float(RECOMPUTE_POLICIES.index("selective")), float(RECOMPUTE_POLICIES.index("full"))
_INTERLEAVED_EXPOSED = 0.3  # share of the messages between stages; the rank's other stages hide the rest


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, on the slowest rank. The entries of ``STEP_COMPONENTS`` add up to ``step``."""

    step: Column
    products: Column  # of the layers without recomputation, as attention, pointwise and gaps
    attention: Column
    pointwise: Column
    gaps: Column
    recomputed: Column
    host: Column  # the device waits for the host
    tensor: Column  # exposed communication of tensor and of context parallelism
    context: Column
    head: Column  # output projection, loss and embedding, if they delay the slowest rank
    bubble: Column  # waiting for other stages
    messages: Column  # between stages
    data: Column  # exposed data-parallel communication
    optimizer: Column  # the update
    stragglers: Column  # waiting for the slowest device
    forward: Column  # one micro-batch in one layer, with communication and recomputation; not per step
    backward: Column
    weight: Column  # share of that backward that computes gradients of weights, twice included
    twice: Column  # computed twice by a split backward pass; the first stage's is not split
    head_pass: Column  # one micro-batch through the head and the embedding; not per step
    embedding_pass: Column
    message: Column  # between stages; not per step

    def row(self, index: int) -> dict[str, float]:
        """All fields of one workload."""
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


_NAMES = [field.name for field in fields(StepTimes)]
STEP_COMPONENTS = tuple(_NAMES[_NAMES.index("products") : _NAMES.index("forward")])
"""The components that add up to a step."""


def step_times(columns: WorkloadColumns, constants: Constants | None = None, program: Program = HLAT) -> StepTimes:
    """Predict the step time of each workload."""
    known = constants or load_constants()
    compute, comm = compute_times(columns, known, program), comm_times(columns, known, program)
    blend = known.shared("blend")

    exposed = program.exposed_tensor(columns)
    tensor_one_way = 2 * exposed * comm.tensor
    context_forward, context_backward = program.context_waits(
        columns, comm.context, compute.attention_forward, compute.attention_backward
    )
    context = context_forward + context_backward
    # Two gathers, half of what a pass sends; full recomputation repeats them with everything else.
    again = np.where((columns.gathers_again > 0) & (columns.recompute != _FULL), exposed * comm.tensor, 0.0)
    forward = _device_and_host(compute.forward + tensor_one_way, compute.host_forward, blend)
    backward = _device_and_host(compute.backward + tensor_one_way + again, compute.host_backward, blend)
    repeated = program.repeated(
        columns, forward, tensor_one_way, compute.forward_products, compute.attention_forward, compute.last
    )
    recomputed = np.select(
        [columns.recompute == _FULL, columns.recompute == _SELECTIVE],
        [repeated, compute.attention_forward],
        0.0,
    )
    # The pass for gradients of weights needs the inputs of products and norms again, but not attention.
    for_weights = np.where(columns.recompute == _FULL, recomputed, 0.0)
    twice = np.where(columns.split_backward > 0, for_weights + known.shared("split") * backward, 0.0)
    recomputed = recomputed + twice
    weight = compute.weight + twice
    layer = forward + backward + recomputed + context

    largest, slowest = program.slowest_stage(columns, layer, compute.head, compute.embedding)
    ends = compute.head + compute.embedding
    mean = (columns.layers * layer + ends) / columns.pipeline
    count = columns.micro_batches
    fill = (columns.pipeline - 1) / columns.virtual

    exposed_messages = np.where(columns.virtual > 1, _INTERLEAVED_EXPOSED, 1.0)
    message = 2 * comm.stage * columns.virtual * exposed_messages
    messages = np.where(columns.pipeline > 1, count * message + fill * message, 0.0)

    data = _exposed_data(columns, comm, known, program, mean)

    stored = rank_weights(columns) / np.where(columns.zero > 0, columns.shards, 1.0)
    optimizer = stored * columns.update_bytes / (columns.memory_rate * known.column("memory", columns))
    optimizer = optimizer + matrix_time(columns, known)
    delayed = np.maximum(0.0, backward + recomputed - 2 * weight)
    unfilled = (columns.layers * (forward + delayed) + ends / 3) / columns.pipeline
    bubble = fill * np.where(columns.split_backward > 0, unfilled, mean)
    stragglers = known.column("straggling", columns) * np.log2(columns.world) * count * slowest
    step = count * slowest + bubble + messages + data + optimizer + stragglers

    scale = largest * count
    tensor = 2 * tensor_one_way + again
    bare = compute.forward + compute.backward + tensor
    return StepTimes(
        step=step,
        products=scale * compute.products,
        attention=scale * compute.attention,
        pointwise=scale * compute.pointwise,
        gaps=scale * compute.gaps,
        recomputed=scale * recomputed,
        host=scale * (forward + backward - bare),
        tensor=scale * tensor,
        context=scale * context,
        head=count * (slowest - largest * layer),
        bubble=bubble,
        messages=messages,
        data=data,
        optimizer=optimizer,
        stragglers=stragglers,
        forward=forward + context_forward,
        backward=backward + recomputed + context_backward,
        weight=weight,
        twice=twice,
        head_pass=compute.head,
        embedding_pass=compute.embedding,
        message=comm.stage * exposed_messages,
    )


def _exposed_data(
    columns: WorkloadColumns, comm: CommTimes, known: Constants, program: Program, rank_compute: Column
) -> Column:
    """Seconds of data-parallel communication in a step that the computing of a rank does not hide."""
    blend, count = known.shared("blend"), columns.micro_batches
    each, once = _data_comm(columns, comm.gather, comm.reduce)
    once = once + comm.across
    contention = known.column("contention", columns)
    per_pass = _exposed_smooth(each, rank_compute * columns.overlaps_data, blend)
    hideable = np.where(program.hides_sums(columns), known.column("hiding", columns) * rank_compute, 0.0)
    exposed_once = _exposed_smooth(once, hideable, blend)
    exposed_once = np.maximum(exposed_once, _ends(columns) * (comm.gather + comm.reduce + comm.across))
    data = per_pass * count + exposed_once
    return data + contention * ((each - per_pass) * count + once - exposed_once)


def matrix_time(columns: WorkloadColumns, known: Constants) -> Column:
    """Seconds in which a pipeline stage exchanges and updates the optimizer's whole matrices."""
    ranks, layers = columns.tensor * columns.context * columns.data, np.ceil(columns.layers / columns.pipeline)
    rate = columns.peak * columns.reached * known.column("products", columns)
    fast = columns.link_rate * known.column("link", columns)
    net = columns.network_rate * known.column("network", columns) / columns.per_instance
    link = np.where(ranks <= np.maximum(columns.domain, columns.per_instance), fast, np.minimum(fast, net))
    # Each rank sends and receives what it stores, there and back, over the links that the data axis crosses.
    sent = columns.matrix_message / (columns.tensor * np.where(columns.zero > 0, columns.shards, 1.0))
    exchange = np.where(ranks > 1, (ranks - 1) / ranks * sent / link, 0.0)
    seconds: Column = layers * (columns.matrix_flops / ranks / rate + exchange)
    return seconds


def _ends(columns: WorkloadColumns) -> Column:
    """Share of sharded weights that travel with nothing to hide them, once per step."""
    weights, layers = rank_weights(columns), np.ceil(columns.layers / columns.pipeline)
    # Embedding, head and one block: gathered before the first block computes, and reduced after the last has.
    share: Column = 1 - (layers - 1) * layer_weights(columns) / weights
    return np.where((columns.zero > 0) & (columns.overlaps_data > 0), share, 0.0)


def _data_comm(columns: WorkloadColumns, gather: Column, reduce: Column) -> tuple[Column, Column]:
    """Data-parallel communication per micro-batch, and once per step."""
    # ZeRO 2 and 3 store only shards of gradients and scatter those of every micro-batch; with a pipeline, once at the
    # end. ZeRO 3 gathers weights for every pass. ZeRO 0 all-reduces: scatter and gather in the gradients' dtype.
    per_micro_batch = (columns.zero >= 2) & (columns.pipeline == 1)
    each = np.where(columns.zero == 3, 2 * gather, 0.0) + np.where(per_micro_batch, reduce, 0.0)
    gathered = np.select([columns.zero == 0, columns.zero == 3], [reduce, 0.0], gather)
    return each, gathered + np.where(per_micro_batch, 0.0, reduce)


def _smooth_maximum(a: Column, b: Column, blend: float) -> Column:
    """The ``blend``-norm of two times: near their maximum unless they are about equal."""
    total: Column = (a**blend + b**blend) ** (1 / blend)
    return total


def _device_and_host(device: Column, host: Column, blend: float) -> Column:
    return np.where(host > 0, _smooth_maximum(device, host, blend), device)


def _exposed_smooth(comm: Column, work: Column, blend: float) -> Column:
    """Communication time that remains after overlap with work, by the smooth maximum."""
    return np.where(work > 0, _smooth_maximum(comm, work, blend) - work, comm)


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage; times in seconds from the start of the step."""

    rank: int
    stage: int
    micro_batch: int
    kind: PassKind
    start: float
    stop: float
    arrived: float = 0.0  # its input, from another stage; 0 without one


@dataclass(frozen=True)
class Timeline:
    """All passes of a step: per rank, in order of execution."""

    ranks: tuple[tuple[Pass, ...], ...]

    @property
    def seconds(self) -> float:
        """End of the last pass."""
        return max(rank[-1].stop for rank in self.ranks)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(each.stop - each.start for each in self.ranks[rank])


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a pass, by stage."""

    forward: Sequence[float]
    backward: Sequence[float]  # complete, both halves
    weight: Sequence[float]  # gradients of weights, which zero-bubble schedules delay; a part of backward
    message: float = 0.0  # from the end of a pass until another rank has received its output

    def duration(self, kind: PassKind, stage: int) -> float:
        if kind == "forward":
            return self.forward[stage]
        if kind == "weight":
            return self.weight[stage]
        return self.backward[stage] - (self.weight[stage] if kind == "input" else 0.0)


def simulate_pipeline(schedule: Schedule, ranks: int, micro_batches: int, times: StageTimes) -> Timeline:
    """Simulate one step; ``times`` has a number of stages that is a multiple of ``ranks``."""
    orders, rank_of_stage = _orders(schedule, ranks, micro_batches, len(times.forward) // ranks)
    return _run_passes(orders, rank_of_stage, times, "input" if schedule in ZERO_BUBBLE else "backward")


@lru_cache(maxsize=32)  # a plan asks again on slower networks
def _orders(schedule: Schedule, ranks: int, micro_batches: int, each: int) -> tuple[list[PassOrder], dict[int, int]]:
    """Passes of every rank in order, and the rank of every stage."""
    orders = [pass_order(schedule, rank, ranks, micro_batches, each) for rank in range(ranks)]
    return orders, {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}


def _run_passes(
    orders: list[PassOrder], rank_of_stage: dict[int, int], times: StageTimes, backward: PassKind
) -> Timeline:
    """Advance every rank as far as its inputs allow, until all ranks have finished."""
    # When each pass has stopped, by kind and stage, then micro-batch; and of each kind and stage, what is the same for
    # all micro-batches: a step has tens of thousands of passes.
    kinds = {(kind, stage) for order in orders for kind, stage, _ in order}
    stopped: dict[tuple[PassKind, int], dict[int, float]] = {key: {} for key in kinds}
    operations = {}
    for kind, stage in kinds:
        needed = _input_of(kind, stage, len(rank_of_stage) - 1, backward)
        message = 0.0 if needed is None or rank_of_stage[needed[1]] == rank_of_stage[stage] else times.message
        inputs = None if needed is None else stopped[needed]
        operations[kind, stage] = times.duration(kind, stage), stopped[kind, stage], inputs, message
    free_at = [0.0] * len(orders)
    timeline: list[list[Pass]] = [[] for _ in orders]
    waiting = set(range(len(orders)))
    while waiting:
        advanced = False
        for rank in sorted(waiting):
            order, done, free = orders[rank], timeline[rank], free_at[rank]
            for kind, stage, batch in islice(order, len(done), None):
                duration, own, inputs, message = operations[kind, stage]
                arrived = 0.0
                if inputs is not None:
                    if batch not in inputs:
                        break
                    arrived = inputs[batch] + message
                start = max(free, arrived)
                own[batch] = free = start + duration
                done.append(Pass(rank, stage, batch, kind, start, free, arrived))
                advanced = True
            free_at[rank] = free
            if len(done) == len(order):
                waiting.discard(rank)
        assert advanced or not waiting, "deadlock: every rank waits for another"
    return Timeline(tuple(map(tuple, timeline)))


def _input_of(kind: PassKind, stage: int, last: int, backward: PassKind) -> tuple[PassKind, int] | None:
    """Kind and stage of the pass whose output this pass needs; None for the first stage's forward pass."""
    if kind == "forward":
        return None if stage == 0 else ("forward", stage - 1)
    if kind == "weight":
        return ("input", stage)
    return ("forward", stage) if stage == last else (backward, stage + 1)


@dataclass(frozen=True)
class OperationTimes:
    """Seconds of the operations of one workload."""

    columns: WorkloadColumns  # one row
    constants: Constants
    attention_forward: float  # the attention core, one layer and micro-batch
    attention_backward: float
    # What is neither product nor attention nor message: pointwise operations, gaps between kernels, casts,
    # accumulation, waiting for the host. One layer and micro-batch; backward with what full recomputation repeats.
    others_forward: float
    others_backward: float
    loss: float  # without the products of the head, one micro-batch
    context: float  # keys and values exchanged forward, one layer and micro-batch
    stage: float  # one message between stages
    gather: float  # per nominal byte of weights gathered by the data axis
    reduce: float  # per nominal byte of gradients
    update: float  # memory traffic of the optimizer's step, without whole matrices
    stragglers: float  # waiting for the slowest device, per step

    @classmethod
    def of(cls, columns: WorkloadColumns, constants: Constants | None = None) -> "OperationTimes":
        """Time the operations of a workload of one row; None for the constants that predictions use."""
        known = constants or load_constants()
        compute, comm, step = compute_times(columns, known), comm_times(columns, known), step_times(columns, known)
        products = Products.of(columns, known)
        forward, by_input, by_weight = layer_products(columns, products)
        # The share of pointwise operations is the host's too: both count per layer and micro-batch.
        host = compute.pointwise * step.host / step.pointwise
        others = compute.forward - forward - compute.attention_forward
        again = np.where(columns.recompute == _FULL, others, 0.0)
        others_backward = compute.backward - by_input - by_weight - compute.attention_backward + again
        rows = columns.vocab / columns.tensor
        head = sum(products.forward_and_backward(columns.tokens, rows, columns.hidden))
        weights = rank_weights(columns)
        return cls(
            columns,
            known,
            attention_forward=float(compute.attention_forward[0]),
            attention_backward=float(compute.attention_backward[0]),
            others_forward=float((others + host / 3)[0]),
            others_backward=float((others_backward + host * 2 / 3)[0]),
            loss=float((compute.head - head)[0]),
            context=float(comm.context[0]),
            stage=float(step.message[0]),
            gather=float((comm.gather / (2 * weights))[0]),
            reduce=float((comm.reduce / (columns.gradient_bytes * weights))[0]),
            update=float((step.optimizer - matrix_time(columns, known))[0]),
            stragglers=float(step.stragglers[0]),
        )

    def products(self, shapes: Column, eight_bit: bool) -> Column:
        """Time products of ``shapes`` (n, 4): number in a batch, rows, columns, width summed over."""
        count, rows, columns, width = np.asarray(shapes, dtype=np.float64).T
        found = Products.of(self.columns, self.constants).seconds(
            rows, columns, width, in_blocks=eight_bit, count=count
        )
        return np.broadcast_to(found, count.shape)

    def tensor_halves(self, sizes: Column) -> Column:
        """Time gathers or scatters over the tensor axis, by nominal bytes of complete tensors."""
        # The formulas are asked about a workload whose message has that size.
        tokens = sizes / (2 * self.columns.hidden)
        micro_batches = tokens * self.columns.context / self.columns.sequence
        seconds: Column = comm_times(self.columns.varied("micro_batch", micro_batches), self.constants).tensor / 2
        return seconds

    def handshake(self, ranks: int) -> float:
        """Time a message of a few bytes between all of some ranks."""
        _, hop = hops(self.columns, self.constants)
        steps = 2 * np.ceil(np.log2(ranks)) if ranks > 1 else 0.0
        return float(self.constants.column("collective", self.columns)[0] + steps * hop[0])
