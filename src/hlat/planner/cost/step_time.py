"""Time of a training step: compute, exposed communication, pipeline bubble, optimizer.

    columns, constants -> compute_times (compute_time.py), comm_times (comm_time.py) -> StepTimes

    stage = layers x (forward + backward + recomputed) + embedding or head
    step  = (m - 1) slowest stage + its own pass + (p - 1)/v mean stage + messages + data parallelism + optimizer

For equal stages this is Narayanan et al. 2021, section 2.2; for unequal ones, apart from the order of passes, the
result of the event simulation (pipeline_sim.py). If backward is split, gradients of weights fill the bubble. What
remains is (p - 1)/v times a forward pass plus the excess of the input gradients' pass over the weight gradients' (Qi et
al. 2024), and part of the backward pass is computed twice. Times of activities that overlap are not added but combined
by a smooth maximum (constants.yaml, ``blend``).
"""

from dataclasses import dataclass, fields

import numpy as np

from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.constants import Constants, load_constants
from hlat.planner.cost.program import HLAT, Program
from hlat.planner.problem.workload import RECOMPUTE_POLICIES, Column, WorkloadColumns, layer_weights, rank_weights

_SELECTIVE, _FULL = float(RECOMPUTE_POLICIES.index("selective")), float(RECOMPUTE_POLICIES.index("full"))
_INTERLEAVED_EXPOSED = 0.3  # share of the messages between stages; the rank's other stages hide the rest


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, on the slowest rank. The entries of ``STEP_COMPONENTS`` add up to ``step``.

    Attributes:
        step: complete step.
        products, attention, pointwise, gaps: components of the layers, without recomputation.
        recomputed: recomputation.
        host: the device waits for the host.
        tensor, context: exposed communication of tensor and context parallelism.
        head: output projection, loss and embedding, if they delay the slowest rank.
        bubble: waiting for other stages.
        messages: messages between stages.
        data: exposed data-parallel communication.
        optimizer: the optimizer's step.
        stragglers: waiting for the slowest device.
        forward, backward: one micro-batch in one layer, with communication and recomputation; not per step.
        weight: the share of that backward that computes gradients of weights, ``twice`` included.
        twice: what a split backward pass computes twice; the first stage's is not split.
        head_pass, embedding_pass: one micro-batch through the head and the embedding; not per step.
        message: one message between stages; not per step.
    """

    step: Column
    products: Column
    attention: Column
    pointwise: Column
    gaps: Column
    recomputed: Column
    host: Column
    tensor: Column
    context: Column
    head: Column
    bubble: Column
    messages: Column
    data: Column
    optimizer: Column
    stragglers: Column
    forward: Column
    backward: Column
    weight: Column
    twice: Column
    head_pass: Column
    embedding_pass: Column
    message: Column

    def row(self, index: int) -> dict[str, float]:
        """All fields of one workload."""
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


STEP_COMPONENTS = (
    "products",
    "attention",
    "pointwise",
    "gaps",
    "recomputed",
    "host",
    "tensor",
    "context",
    "head",
    "bubble",
    "messages",
    "data",
    "optimizer",
    "stragglers",
)
"""The components that add up to a step."""


def step_times(columns: WorkloadColumns, constants: Constants | None = None, program: Program = HLAT) -> StepTimes:
    """Predict the step time of each workload."""
    known = constants or load_constants()
    compute, comm = compute_times(columns, known, program), comm_times(columns, known, program)
    blend = known.shared("blend")

    exposed = program.exposed_tensor(columns, known)
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
        [known.column("recomputed", columns) * repeated, compute.attention_forward],
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

    rank_compute = mean
    each, once = _data_comm(columns, comm.gather, comm.reduce)
    once = once + comm.across
    contention = known.column("contention", columns)
    per_pass = _exposed_smooth(each, rank_compute * columns.overlaps_data, blend)
    hideable = np.where(program.hides_sums(columns), known.column("hiding", columns) * rank_compute, 0.0)
    exposed_once = _exposed_smooth(once, hideable, blend)
    exposed_once = np.maximum(exposed_once, _ends(columns) * (comm.gather + comm.reduce + comm.across))
    data = per_pass * count + exposed_once
    data = data + contention * ((each - per_pass) * count + once - exposed_once)

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


def matrix_time(columns: WorkloadColumns, known: Constants) -> Column:
    """Seconds in which the ranks of a pipeline stage exchange and update the whole matrices of the optimizer.

    The ranks share the FLOPs, and each sends and receives what it stores: there and back, over the links that the data
    axis crosses.
    """
    ranks, layers = columns.tensor * columns.context * columns.data, np.ceil(columns.layers / columns.pipeline)
    rate = columns.peak * columns.reached * known.column("products", columns)
    fast = columns.link_rate * known.column("link", columns)
    net = columns.network_rate * known.column("network", columns) / columns.per_instance
    link = np.where(ranks <= np.maximum(columns.domain, columns.per_instance), fast, np.minimum(fast, net))
    sent = columns.matrix_message / (columns.tensor * np.where(columns.zero > 0, columns.shards, 1.0))
    exchange = np.where(ranks > 1, (ranks - 1) / ranks * sent / link, 0.0)
    seconds: Column = layers * (columns.matrix_flops / ranks / rate + exchange)
    return seconds


def _ends(columns: WorkloadColumns) -> Column:
    """Share of sharded weights that travel with nothing to hide them, once per step: embedding, head and one block.

    They are gathered before the first block computes, and reduced after the last has.
    """
    weights, layers = rank_weights(columns), np.ceil(columns.layers / columns.pipeline)
    share: Column = 1 - (layers - 1) * layer_weights(columns) / weights
    return np.where((columns.zero > 0) & (columns.overlaps_data > 0), share, 0.0)


def _data_comm(columns: WorkloadColumns, gather: Column, reduce: Column) -> tuple[Column, Column]:
    """Data-parallel communication per micro-batch, and once per step.

    ZeRO 2 stores only shards of gradients and scatters those of every micro-batch; with a pipeline, once at the end.
    ZeRO 3 gathers weights for every pass. ZeRO 0 all-reduces: scatter and gather in the gradients' dtype.
    """
    per_micro_batch = (columns.zero >= 2) & (columns.pipeline == 1)
    each = np.where(columns.zero == 3, 2 * gather, 0.0) + np.where(per_micro_batch, reduce, 0.0)
    gathered = np.select([columns.zero == 0, columns.zero == 3], [reduce, 0.0], gather)
    return each, gathered + np.where(per_micro_batch, 0.0, reduce)


def _smooth_maximum(a: Column, b: Column, blend: float) -> Column:
    """The ``blend``-norm of two times: near their maximum unless they are about equal."""
    total: Column = (a**blend + b**blend) ** (1 / blend)
    return total


def _device_and_host(device: Column, host: Column, blend: float) -> Column:
    """Time of a device and the host that launches its kernels."""
    return np.where(host > 0, _smooth_maximum(device, host, blend), device)


def _exposed_smooth(comm: Column, work: Column, blend: float) -> Column:
    """Communication time that remains after overlap with work, by the smooth maximum."""
    return np.where(work > 0, _smooth_maximum(comm, work, blend) - work, comm)
