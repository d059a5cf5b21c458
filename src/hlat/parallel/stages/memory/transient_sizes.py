"""Sizes of the transient tensors of a rank (gradients, activations, logits, buffers), by purpose.

step shape, layers and ends of a rank -> saved_activations.py, block_backward.py, model_ends.py -> TransientSizes
"""

from dataclasses import dataclass

from hlat.model import GradientSum, axis_share, block_share, element_share, model_spec
from hlat.parallel.stages.eager_kernels import EagerKernels
from hlat.parallel.stages.memory.model_ends import (
    EndTensors,
    embedding_peak,
    final_norm_peak,
    loss_backward_bytes,
    loss_peak,
)
from hlat.parallel.stages.memory.saved_activations import BlockBytes, block_bytes, saved_bytes
from hlat.parallel.stages.step_shape import StepShape
from hlat.precision import MODES


@dataclass(frozen=True)
class TransientSizes:
    """Transient bytes of a rank, by purpose.

    Attributes:
        per_pass: activations that a micro-batch saves in one stage.
        per_layer: activations that a micro-batch saves in one layer.
        at_entry: activations that a micro-batch saves outside of blocks, until its pass ends.
        final_norm: activations that the final norm saves; 0 without head.
        by_loss: gradients that the loss saves.
        block: temporary tensors while a block runs, beyond its saved activations.
        embedding: temporary tensors while the embedding's gradient is computed; None without embedding.
        loss: temporary tensors of head and loss in the forward pass; None without head.
        loss_backward: temporary tensors of head and loss in the backward pass.
        norm: temporary tensors of the final norm in the backward pass.
        head_waits: True if the gradient of a tied head waits in autograd for that of the embedding.
        head_gradient: gradient of the head, from the backward pass of the loss on, if it takes memory of its own.
        first_head_gradient: the same in the first pass of a stage, whose gradients do not exist yet.
        split_layer, split_pass: tensors that the first half of a split backward pass keeps for the weight gradients, of
            a layer and of a stage; split_received: those of a pass that are in the receive buffer of a message;
            split_norm: that of the final norm, the gradient by its output; 0 without head.
        largest_gradient: the largest gradient of a parameter.
        block_gradient, end_gradient: gradients of a block, and of embedding and head, as they are stored.
        gradients: gradients of one stage.
        gathered: gathered parameters of a sharded block, if they are freed after each pass.
        block_gather: buffer in which parameters of a sharded block are gathered.
        last_gather: such buffers that FSDP2 keeps from a forward pass of a pipeline stage, until its next gather.
        block_kept: gradients of a sharded block before they are reduced or accumulated.
        block_reduced: buffer in which gradients of a sharded block are reduced.
        end_kept, end_reduced: the same for embedding and head, or for each of them if they are gathered apart.
        head_freed: gathered head, freed after its backward pass; 0 if it stays until that of the embedding.
        message: a message between stages.
        virtual: number of stages.
    """

    per_pass: float
    per_layer: float
    at_entry: float
    final_norm: float
    by_loss: float
    block: BlockBytes
    embedding: float | None
    loss: float | None
    loss_backward: float
    norm: float
    head_waits: bool
    head_gradient: float
    first_head_gradient: float
    split_layer: float
    split_pass: float
    split_received: float
    split_norm: float
    largest_gradient: float
    block_gradient: float
    end_gradient: float
    gradients: float
    gathered: float
    block_gather: float
    last_gather: float
    block_kept: float
    block_reduced: float
    end_kept: float
    end_reduced: float
    head_freed: float
    message: float
    virtual: int


def transient_sizes(
    step: StepShape, layers: float, ends: tuple[bool, bool], gradients: float, kernels: EagerKernels
) -> TransientSizes:
    """Count the transient tensors of a rank.

    Args:
        step: model, layout and batch of a training step.
        layers: layers of the rank.
        ends: (True if it has the embedding, True if it has the head).
        gradients: bytes of accumulated gradients.
        kernels: eager kernels of the device.
    """
    model, mode, layout = step.model, MODES[step.mode], step.layout
    saved = saved_bytes(step, ends, kernels)
    tokens = step.micro_batch * step.sequence / layout.context
    item, stored = mode.compute.itemsize, (mode.compute if step.sharded else mode.weights).itemsize
    gathers = layout.sequence_parallel and layout.tensor > 1
    at_ends = EndTensors(
        model,
        layout.tensor,
        tokens,
        item,
        stored,
        gathers,
        reorders=step.micro_batch > 1,
        rounds=kernels.rounds,
        fused=kernels.fused,
    )
    block, split = block_share(model, layout.tensor), _split_backward_bytes(step, tokens * item)
    message = tokens * item * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    accumulates = step.micro_batches > 1  # into gradients that an earlier micro-batch has made
    # Without FSDP2 a gradient is cast to the dtype of the weight, and then it is the accumulated one or added to it.
    cast = stored if stored != item else 0
    first_kept = item if step.sharded else mode.gradients.itemsize
    whole = not step.sharded or layout.pipeline > 1 or layout.zero == 1  # gradients between micro-batches
    in_place = accumulates and whole and (not step.sharded or mode.compute == mode.gradients)
    kept = 0 if in_place else first_kept
    tied = model.tie_embeddings and all(ends)  # one matrix on this rank
    matrices = 1 if tied or step.gathers_ends_apart else sum(ends)
    # A tied head's gradient waits in autograd for that of the embedding, whatever is accumulated later.
    waiting = at_ends.matrix * stored if tied else 0.0
    first_head = waiting or ends[1] * at_ends.matrix * first_kept
    sharing = step.shards if step.sharded and layout.pipeline == 1 and (layout.zero > 1 or not accumulates) else 1
    reduced = mode.reduction.itemsize if step.sharded else 0
    return TransientSizes(
        per_pass=(layers * saved.per_layer + saved.at_entry) / step.virtual,
        per_layer=saved.per_layer,
        at_entry=saved.at_entry,
        final_norm=saved.final_norm,
        by_loss=saved.by_loss,
        block=block_bytes(step, kernels, cast, kept),
        embedding=embedding_peak(at_ends) if ends[0] else None,
        loss=loss_peak(at_ends) if ends[1] else None,
        loss_backward=loss_backward_bytes(at_ends),
        norm=final_norm_peak(at_ends),
        head_waits=bool(waiting),
        head_gradient=waiting if in_place else first_head,
        first_head_gradient=first_head,
        split_layer=split,
        split_pass=layers / step.virtual * split,
        # The gradient by a stage's output is that of its last product, unless that has a gathered copy.
        split_received=message if gathers else 0.0,
        split_norm=ends[1] * at_ends.stream,
        largest_gradient=max(*_parameter_sizes(step), at_ends.matrix * any(ends)) * mode.gradients.itemsize,
        block_gradient=block * mode.gradients.itemsize / sharing,
        end_gradient=at_ends.matrix * mode.gradients.itemsize / sharing,
        gradients=gradients / step.virtual,
        # Several stages of a rank gather all their blocks at once: they are among the parameters within a step.
        gathered=block * item if layout.zero == 3 and step.sharded and step.virtual == 1 else 0.0,
        block_gather=block * item if step.sharded else 0.0,
        last_gather=block * item * min(2, step.virtual) if layout.zero == 3 and step.sharded else 0.0,
        block_kept=block * kept if step.sharded else 0.0,
        block_reduced=block * reduced,
        end_kept=matrices * at_ends.matrix * item if step.sharded else 0.0,
        end_reduced=matrices * at_ends.matrix * reduced,
        head_freed=at_ends.matrix * item if step.gathers_ends_apart else 0.0,
        message=message,
        virtual=step.virtual,
    )


def _split_backward_bytes(step: StepShape, size: float) -> float:
    """Bytes per layer kept between the halves of a split backward pass: gradients by outputs of products and norms.

    Args:
        step: model, layout and batch of a training step.
        size: bytes of one element per token of a micro-batch.
    """
    model, count = step.model, step.layout.tensor
    tensors = model_spec(model).block_tensors
    products = sum(axis_share(model, tensor.rows, count) for tensor in tensors if tensor.is_product)
    norms = sum(
        axis_share(model, tensor.rows, count) for tensor in tensors if tensor.gradient_sum is GradientSum.SEQUENCE
    )
    return size * (products + norms / (count if step.layout.sequence_parallel else 1))


def _parameter_sizes(step: StepShape) -> list[float]:
    """Elements of each parameter of a block on a rank."""
    model = step.model
    return [
        sum(element_share(model, tensor, step.layout.tensor) for tensor in parameter.tensors)
        for parameter in model_spec(model).block
    ]
