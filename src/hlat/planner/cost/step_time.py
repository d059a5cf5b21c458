"""Seconds of a training step: computation, what of the talk stays visible, the pipeline's bubble, the optimizer.

    columns, constants -> passes (compute.py), traffic (traffic.py) -> StepTimes

    stage = layers x (forward + backward + recomputed) + its end of the model
    step  = (m - 1) slowest stage + its own pass + (p - 1)/v mean stage + messages + data-parallel traffic + optimizer

which for equal stages is Narayanan et al. 2021, section 2.2, and for unequal ones what the event simulation of
pipeline.py gives but for the order of passes. Where backward is taken apart, gradients of weights fill the bubble: what
is left of it is (p - 1)/v of a forward pass, and of what the inputs' part takes longer than the weights' (Qi et al.
2024), and some is computed again for each part. What runs side by side is blended (constants.yaml, ``blend``),
not added.
"""

from dataclasses import dataclass, fields

import numpy as np

from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.constants import Constants, load_constants
from hlat.planner.problem import RECOMPUTE_POLICIES, Column, WorkloadColumns, rank_weights

_SELECTIVE, _FULL = float(RECOMPUTE_POLICIES.index("selective")), float(RECOMPUTE_POLICIES.index("full"))
_INTERLEAVED_VISIBLE = 0.3  # of messages between stages, where other stages of the rank have work meanwhile
_OPTIMIZER_BYTES = 30  # per parameter: fp32 weight, gradient and two moments read, three of them and a copy written


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step; every part is of the slowest rank and of the whole step, and they add up to ``step``.

    Attributes:
        step: all of it.
        products, attention, pointwise, gaps: of layers, recomputation not included.
        recomputed: what is computed again.
        host: that the device waits for the host.
        tensor, context: visible talk of tensor and context parallelism.
        head: output projection and loss, where they delay the slowest rank.
        bubble: waiting for other stages.
        messages: between stages.
        data: visible talk of data parallelism.
        optimizer: its step.
        stragglers: waiting for the slowest of all devices.
        forward, backward: of one micro-batch in one layer, with talk and recomputation; not of a step.
        weight: of that backward, what makes gradients of weights, with ``twice``.
        twice: of that, what is computed again because backward is taken apart; the first stage's is not.
        head_pass: of one micro-batch through the head; not of a step.
        message: one, from stage to stage; not of a step.
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
    message: Column

    def row(self, index: int) -> dict[str, float]:
        """All parts of one work."""
        return {field.name: float(getattr(self, field.name)[index]) for field in fields(self)}


STEP_COMPONENTS = ("products", "attention", "pointwise", "gaps", "recomputed", "host", "tensor", "context", "head", "bubble",
         "messages", "data", "optimizer", "stragglers")  # fmt: skip
"""The parts that a step adds up from."""


def stage_layers(columns: WorkloadColumns) -> tuple[Column, Column]:
    """Layers of the pipeline rank that has most of them, and of the last.

    Where layers do not divide evenly the ends have fewer: they have the embedding and the head besides.
    """
    most = np.ceil(columns.layers / columns.pipeline)
    even = columns.layers % columns.pipeline == 0
    without_ends = (columns.layers + 2) % columns.pipeline == 0
    last = np.where(
        even, most, np.where(without_ends, most - 1, np.maximum(1.0, np.floor(columns.layers / columns.pipeline)))
    )
    return most, last


def step_times(columns: WorkloadColumns, constants: Constants | None = None) -> StepTimes:
    """Predict a step of each work."""
    known = constants or load_constants()
    compute, talk, blend = compute_times(columns, known), comm_times(columns, known), known.one("blend")

    visible = np.where(columns.overlaps_tensor > 0, known.of("exposed_tensor", columns), 1.0)
    tensor_one_way = 2 * visible * talk.tensor
    beside = columns.overlaps_context
    context = _left_over(talk.context, beside * compute.attention_forward)
    context = context + _left_over(2 * talk.context, beside * compute.attention_backward)
    forward = _beside(compute.forward + tensor_one_way, compute.host_forward, blend)
    backward = _beside(compute.backward + tensor_one_way, compute.host_backward, blend)
    # The last all-reduce of a layer's forward pass is not needed again.
    whole = forward - tensor_one_way / 2 - columns.early_stop * compute.last
    again = np.select(
        [columns.recompute == _FULL, columns.recompute == _SELECTIVE],
        [known.of("recomputed", columns) * whole, compute.attention_forward],
        0.0,
    )
    # Weights' gradients need again what products and norms took, but not attention.
    needed = np.where(columns.recompute == _FULL, again, 0.0)
    twice = np.where(columns.split_backward > 0, needed + known.one("split") * backward, 0.0)
    again = again + twice
    weight = compute.weight + twice
    layer = forward + backward + again + context

    most, last = stage_layers(columns)
    slowest = np.maximum(most * layer, last * layer + compute.head)
    mean = (columns.layers * layer + compute.head) / columns.pipeline
    count = columns.micro_batches
    fill = (columns.pipeline - 1) / columns.virtual

    shown = np.where(columns.virtual > 1, _INTERLEAVED_VISIBLE, 1.0)
    message = 2 * talk.stage * columns.virtual * shown
    messages = np.where(columns.pipeline > 1, count * message + fill * message, 0.0)

    own = layer * columns.layers / columns.pipeline + compute.head / columns.pipeline
    each, once = _data_talk(columns, talk.gather, talk.reduce)
    per_pass = _left_over_blended(each, own * columns.overlaps_data, blend)
    hidden = np.where(columns.overlaps_data > 0, known.of("hiding", columns) * own, 0.0)
    data = per_pass * count + _left_over_blended(once, hidden, blend)

    held = rank_weights(columns) / np.where(columns.zero > 0, columns.shards, 1.0)
    optimizer = held * _OPTIMIZER_BYTES / (columns.memory_rate * known.of("memory", columns))
    delayed = np.maximum(0.0, backward + again - 2 * weight)
    in_gaps = (columns.layers * (forward + delayed) + compute.head / 3) / columns.pipeline
    bubble = fill * np.where(columns.split_backward > 0, in_gaps, mean)
    stragglers = known.of("straggling", columns) * np.log2(columns.world) * count * slowest
    step = count * slowest + bubble + messages + data + optimizer + stragglers

    scale = most * count
    bare = compute.forward + compute.backward + 2 * tensor_one_way
    return StepTimes(
        step=step,
        products=scale * compute.products,
        attention=scale * compute.attention,
        pointwise=scale * compute.pointwise,
        gaps=scale * compute.gaps,
        recomputed=scale * again,
        host=scale * (forward + backward - bare),
        tensor=scale * 2 * tensor_one_way,
        context=scale * context,
        head=count * (slowest - most * layer),
        bubble=bubble,
        messages=messages,
        data=data,
        optimizer=optimizer,
        stragglers=stragglers,
        forward=forward + context / 3,
        backward=backward + again + context * 2 / 3,
        weight=weight,
        twice=twice,
        head_pass=compute.head,
        message=talk.stage * shown,
    )


def _data_talk(columns: WorkloadColumns, gather: Column, reduce: Column) -> tuple[Column, Column]:
    """Data-parallel traffic of each micro-batch, and once a step.

    ZeRO 2 keeps shards of gradients only, and has to scatter those of every micro-batch; a pipeline does at its end.
    ZeRO 3 gathers weights for every pass. Without ZeRO an all-reduce: scattered and gathered in the dtype of gradients.
    """
    often = (columns.zero >= 2) & (columns.pipeline == 1)
    each = np.where(columns.zero == 3, 2 * gather, 0.0) + np.where(often, reduce, 0.0)
    gathered = np.select([columns.zero == 0, columns.zero == 3], [reduce, 0.0], gather)
    return each, gathered + np.where(often, 0.0, reduce)


def _left_over(talk: Column, work: Column) -> Column:
    return np.maximum(0.0, talk - work)


def _blended(one: Column, other: Column, blend: float) -> Column:
    total: Column = (one**blend + other**blend) ** (1 / blend)
    return total


def _beside(device: Column, host: Column, blend: float) -> Column:
    """A device and the host that drives it."""
    return np.where(host > 0, _blended(device, host, blend), device)


def _left_over_blended(talk: Column, work: Column, blend: float) -> Column:
    """What of the talk is seen beside work that hides it."""
    return np.where(work > 0, _blended(talk, work, blend) - work, talk)
