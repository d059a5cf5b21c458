"""One rank of a run, built and taken through a step by the program itself, watched.

    recipe, rank -> its share of the model, AdamW -> a step on made-up tokens -> what a checkpoint takes -> RankReport

AdamW is prepared before that step, so that it is like all that follow it.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from hlat.checkpoint import collect
from hlat.config import Recipe
from hlat.data.samples import Batch
from hlat.model import local
from hlat.optim import build_optimizer, prepare
from hlat.parallel import ParallelModel, build_parallel
from hlat.parallel.mesh import Coordinates, Layout
from hlat.rehearsal.flops import FlopCounter
from hlat.rehearsal.memory import MemoryTracker, storage_key
from hlat.rehearsal.operations import OperationObserver
from hlat.rehearsal.traffic import Message, MessageCounter
from hlat.runtime.distributed import Runtime, host_values
from hlat.runtime.process import enter_phase
from hlat.training import accumulate_gradients, update
from hlat.training.process import scheduled_gc


@dataclass(frozen=True)
class RankReport:
    """What a rank needs for a step.

    Attributes:
        rank, place: which one.
        layers: of its stages, the first and one past the last of each.
        peak_bytes: the most memory that it needs at any moment of a step.
        peak: of what that consists, by category (``CATEGORIES``).
        peak_phase: what it does at that moment.
        between_steps: what it holds between steps, by category.
        messages: how many of each it takes part in.
        flops: of its products and attentions.
        checkpoint_blocks, checkpoint_bytes: what it writes of a checkpoint.
    """

    rank: int
    place: Coordinates
    layers: tuple[tuple[int, int], ...]
    peak_bytes: int
    peak: dict[str, int]
    peak_phase: str
    between_steps: dict[str, int]
    messages: dict[Message, int]
    flops: int
    checkpoint_blocks: int
    checkpoint_bytes: int


def rehearse_rank(recipe: Recipe, runtime: Runtime) -> RankReport:
    """Build a rank and take it through a step. Collective, where there are other ranks.

    Args:
        recipe: validated for this number of processes.
        runtime: the rank, of a rehearsal (``hlat.runtime.distributed.fake_rank``) or of a run.

    Raises:
        HlatError: the rank cannot be built.
    """
    enter_phase("start")
    layout = Layout.of(recipe.parallel, runtime.world)
    held = _StateStorages()
    memory, flops = MemoryTracker(held.categories), FlopCounter()
    traffic = MessageCounter(layout, lambda tensor, axis: _mark_message(memory, tensor, axis))
    with memory.resizing(), scheduled_gc():
        with OperationObserver(memory.observe):
            model = build_parallel(recipe, runtime, seed=None)
            optimizer = build_optimizer(model.held, recipe.optimizer, recipe.precision.mode, recipe.training.seed)
            prepare(optimizer, model.held)
        held.take(model, optimizer)
        batch = _batch(recipe, model)
        with OperationObserver(memory.observe, traffic.observe, flops.observe), _loss_marked(model, memory):
            whole = [one.view_as(one) for one in (batch.inputs_BS, batch.labels_BS)]  # on the device, like its parts
            update(model, optimizer, recipe, 1, accumulate_gradients(model, batch))
        enter_phase("between")
        del whole, batch
        peak, between = memory.at_peak(), memory.now()
    blocks = _checkpoint_blocks(recipe, runtime, model, optimizer)
    return RankReport(
        rank=runtime.rank,
        place=layout.coordinates(runtime.rank),
        layers=tuple((part.start, part.stop) for part in (one.part.layer_range(recipe.model) for one in model.parts)),
        peak_bytes=memory.peak,
        peak=peak,
        peak_phase=memory.phase,
        between_steps=between,
        messages=dict(traffic.messages),
        flops=flops.total,
        checkpoint_blocks=len(blocks),
        checkpoint_bytes=sum(blocks),
    )


class _StateStorages:
    """Which storages are parameters, gathered ones, gradients, and moments."""

    def __init__(self) -> None:
        self._model: ParallelModel | None = None
        self._moments: dict[int, str] = {}

    def take(self, model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        """Look at these from now on."""
        self._model = model
        for entry in optimizer.state.values():
            self._moments |= {storage_key(local(tensor)): "optimizer" for tensor in entry.values()}

    def categories(self) -> Mapping[int, str]:
        """By ``storage_key``."""
        if self._model is None:
            return {}
        passing = {storage_key(tensor): "gathered" for tensor in self._model.gathered()}
        passing |= {storage_key(tensor): "parameters" for tensor in self._model.stored()}
        passing |= {storage_key(tensor): "gradients" for tensor in self._model.gradients()}
        return passing | self._moments


def _batch(recipe: Recipe, model: ParallelModel) -> Batch:
    """This rank's sequences of a step, each one document; they are on the host, where they have values."""
    shape = (len(model.rows), recipe.data.sequence_length)
    with host_values():
        tokens = torch.zeros(shape, dtype=torch.int64)
        positions = torch.arange(shape[1]).expand(shape).contiguous() if recipe.data.isolate else None
        return Batch(tokens, tokens.clone(), np.asarray(model.rows), 0, positions)


def _mark_message(memory: MemoryTracker, tensor: torch.Tensor, axis: str) -> None:
    """What the tensor and context axes exchange are activations like others; the rest is there to be sent."""
    if "data" in axis or "pipeline" in axis:
        memory.assign(tensor, "communication")


@contextmanager
def _loss_marked(model: ParallelModel, memory: MemoryTracker) -> Iterator[None]:
    """Within the block, what head and loss make is theirs."""
    with ExitStack() as stack:
        for part in model.parts:
            if part.head is not None:
                inside = ExitStack()
                before = part.head.register_forward_pre_hook(
                    lambda *_, inside=inside: inside.enter_context(memory.within("loss")), prepend=True
                )
                after = part.head.register_forward_hook(lambda *_, inside=inside: inside.close())
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


def _checkpoint_blocks(
    recipe: Recipe, runtime: Runtime, model: ParallelModel, optimizer: torch.optim.Optimizer
) -> list[int]:
    """Bytes of each block of a checkpoint that this rank writes."""
    with host_values():
        for entry in optimizer.state.values():
            entry["step"] = torch.ones(())  # as it is; a rehearsal's counter cannot say so
        blocks = collect(recipe.model, model.held, optimizer)
    return [block.nbytes for block in blocks if runtime.rank == 0 or not block.replicated]
