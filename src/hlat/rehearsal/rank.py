"""Rehearsal of one rank: the program builds it and runs one step under observation.

    recipe, rank -> shard of the model, optimizer, components -> a step on dummy tokens -> part of a checkpoint
        -> RankReport

The optimizer's state is created before that step, so that the step is like every later one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hlat.checkpoint import ExtraState, collect
from hlat.config import Recipe
from hlat.data import Batch
from hlat.model import local
from hlat.optim import Optimizer
from hlat.parallel import Coordinates, Layout, ParallelModel, build_parallel
from hlat.rehearsal.observers import MemoryTracker, MeshAxes, Message, OperationObserver, storage_key
from hlat.rehearsal.trace import TO_ITSELF, Trace, TraceEvent
from hlat.runtime.distributed.join import Runtime, host_values
from hlat.runtime.progress import enter_phase
from hlat.training import (
    ComponentList,
    StepEnd,
    accumulate_gradients,
    requested_components,
    requested_optimizer,
    scheduled_gc,
    update,
)


@dataclass(frozen=True)
class RankReport:
    """Memory, messages and FLOPs of a rank in one step."""

    rank: int  # global
    coordinates: Coordinates  # on the mesh axes
    layers: tuple[tuple[int, int], ...]  # first layer and one past the last, for each of its stages
    peak_bytes: int
    peak: dict[str, int]  # bytes at the peak by category (CATEGORIES)
    peak_phase: str  # of the step
    between_steps: dict[str, int]  # bytes by category
    checkpoint_blocks: int  # tensor chunks that the rank writes to a checkpoint
    checkpoint_bytes: int
    trace: tuple[TraceEvent, ...]  # messages and operations in the order of issue

    @cached_property
    def messages(self) -> dict[Message, int]:
        """Number of messages of each kind."""
        sent = ((event.axis.replace(TO_ITSELF, ""), event.kind, event.size) for event in self.trace if event.is_message)
        return dict(Counter(Message(*each) for each in sent))

    @cached_property
    def flops(self) -> int:
        """FLOPs of matrix products and attention."""
        return sum(event.flops for event in self.trace)


def rehearse_rank(recipe: Recipe, runtime: Runtime) -> RankReport:
    """Build a rank and run one step of it. In a real run this is a collective operation.

    The runtime is that of a rehearsal (``hlat.runtime.distributed.join.fake_rank``) or of a real run. HlatError: the
    rank cannot be built.
    """
    enter_phase("start")
    layout = Layout.of(recipe.parallel, runtime.world)
    storages = _StateStorages()
    memory = MemoryTracker(storages.categories)
    trace = Trace(MeshAxes(layout).of, lambda tensor, axis: _mark_message(memory, tensor, axis))
    with memory.resizing(), scheduled_gc():
        with OperationObserver(memory.observe):
            model = build_parallel(recipe, runtime, seed=None)
            optimizer = requested_optimizer(recipe, model)
            # Before the step, so that it is like every later one.
            optimizer.allocate_state()
            components = requested_components(recipe, model.local_parameters)
            components.reset()
        storages.follow(model, optimizer, components.state())
        batch = _batch(recipe, model)
        with OperationObserver(memory.observe, trace.observe), _loss_marked(model, memory):
            # The complete batch counts as memory on the device, like its micro-batches.
            whole = [tokens.view_as(tokens) for tokens in (batch.inputs_BS, batch.labels_BS)]
            step = 1 if recipe.place is None else recipe.place.first + 1
            result = update(model, optimizer, recipe, step, accumulate_gradients(model, batch))
            components.after_step(StepEnd(1, result, is_last=False))
        enter_phase("between")
        del whole, batch, result
        peak, between_steps = memory.at_peak(), memory.now()
    blocks = _checkpoint_blocks(recipe, runtime, model, optimizer, components)
    stage_layers = (stage.shard.layer_range(recipe.model) for stage in model.stages)
    return RankReport(
        rank=runtime.rank,
        coordinates=layout.coordinates(runtime.rank),
        layers=tuple((layers.start, layers.stop) for layers in stage_layers),
        peak_bytes=memory.peak,
        peak=peak,
        peak_phase=memory.phase,
        between_steps=between_steps,
        checkpoint_blocks=len(blocks),
        checkpoint_bytes=sum(blocks),
        trace=tuple(trace.events),
    )


class _StateStorages:
    """Identifies the storages of parameters, gathered parameters, gradients, optimizer and components."""

    def __init__(self) -> None:
        self._model: ParallelModel | None = None
        self._kept: dict[int, str] = {}

    def follow(self, model: ParallelModel, optimizer: Optimizer, component_states: Sequence[ExtraState]) -> None:
        self._model = model
        for entry in optimizer.state.values():
            self._kept |= {storage_key(local(tensor)): "optimizer" for tensor in entry.values()}
        for state in component_states:
            tensors = (*state.by_parameter, *state.replicated.values())
            self._kept |= {storage_key(tensor): "components" for tensor in tensors}

    def categories(self) -> Mapping[int, str]:
        """Category by ``storage_key``."""
        if self._model is None:
            return {}
        current = {storage_key(tensor): "gathered" for tensor in self._model.gathered_parameters()}
        current |= {storage_key(tensor): "parameters" for tensor in self._model.stored_parameters()}
        current |= {storage_key(tensor): "gradients" for tensor in self._model.gradients()}
        return current | self._kept


def _batch(recipe: Recipe, model: ParallelModel) -> Batch:
    """This rank's sequences of a step, one document each."""
    rows = model.rows(recipe.batch.global_batch)
    shape = (len(rows), recipe.data.sequence_length)
    # Tensors have values there, not in a fake world.
    with host_values():
        tokens = torch.zeros(shape, dtype=torch.int64)
        positions = torch.arange(shape[1]).expand(shape).contiguous() if recipe.data.isolate else None
        return Batch(tokens, tokens.clone(), np.asarray(rows), positions)


def _mark_message(memory: MemoryTracker, tensor: torch.Tensor, axis: str) -> None:
    """Mark buffers of the data and pipeline axes."""
    # Buffers of the tensor and context axes count as activations.
    if "data" in axis or "pipeline" in axis:
        memory.assign(tensor, "communication")


@contextmanager
def _loss_marked(model: ParallelModel, memory: MemoryTracker) -> Iterator[None]:
    """Count tensors that head and loss create within the block as ``loss``."""
    with ExitStack() as stack:
        for stage in model.stages:
            if stage.head is not None:
                inside = ExitStack()
                before = stage.head.register_forward_pre_hook(
                    lambda *_, inside=inside: inside.enter_context(memory.within("loss")), prepend=True
                )
                after = stage.head.register_forward_hook(lambda *_, inside=inside: inside.close())
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


def _checkpoint_blocks(
    recipe: Recipe,
    runtime: Runtime,
    model: ParallelModel,
    optimizer: Optimizer,
    components: ComponentList,
) -> list[int]:
    """Bytes of each tensor chunk of a checkpoint that this rank writes."""
    with host_values():
        for entry in optimizer.state.values():
            entry["step"] = torch.ones(())  # a fake tensor has no value
        blocks = collect(recipe.model, model.local_parameters, optimizer, components.state())
    return [block.nbytes for block in blocks if runtime.rank == 0 or not block.replicated]
