"""A model in a layout: what one rank holds of it, and how all ranks together train and evaluate it.

    recipe, layout, rank -> this rank's stages on the meta device -> tensor, sequence, context parallelism attached
        -> compiled, activation checkpointing -> sharded by FSDP2 -> memory for this rank's share -> initial weights

One process with everything at 1 is a layout like any other: nothing is attached, and the model is the plain decoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hlat.activation_checkpointing import checkpoint_activations, plan_activations
from hlat.config import Recipe
from hlat.model import IGNORED, Decoder, ModelShard, collect_local_parameters, initialise, replace_parameters
from hlat.parallel.compile import check_isolation, compile_blocks, decide_compilation
from hlat.parallel.fsdp import (
    all_reduce_gradients,
    configure_micro_batch,
    gathered_parameters,
    reshard,
    shard_model,
    sharded_parameters,
    unsharded_gradients,
)
from hlat.parallel.gradient_sync import ReplicatedGradients, owned_rows, sum_over_world
from hlat.parallel.mesh import Layout, ProcessGroups, create_process_groups
from hlat.parallel.micro_batch import MicroBatch
from hlat.parallel.norms import clip, sum_of_squares
from hlat.parallel.stages import StepShape, rank_model_shards
from hlat.parallel.tensor_parallel import parallelize_block
from hlat.parallel.vocab_parallel import parallelize_embedding_and_head
from hlat.precision import MODES, Mode, check_fp8, convert_to_fp8
from hlat.runtime.distributed import Runtime, host_values
from hlat.runtime.process import enter_phase

if TYPE_CHECKING:
    from hlat.parallel.pipeline_parallel import Pipeline


class ParallelModel:
    """What a rank holds of a model, and the collective operations on it; every rank calls them together.

    Attributes:
        layout, groups: who does what, and over which links.
        config: the whole model.
        parts: this rank's stages; the whole model where there is no pipeline.
        held: this rank's parameters, in the order of the data.
    """

    def __init__(
        self, recipe: Recipe, runtime: Runtime, layout: Layout, groups: ProcessGroups, parts: list[Decoder]
    ) -> None:
        self.layout, self.groups, self.stages = layout, groups, parts
        self.config = recipe.model
        self._recipe, self._device, self._rank = recipe, runtime.device, runtime.rank
        place = layout.coordinates(runtime.rank)
        self._place = place
        # FSDP2 says itself which shard a rank holds; what is replicated is owned by the first of those that have it.
        owned = (place.dp == 0 and place.cp == 0) or groups.shard_mesh is not None
        self.local_parameters = [one for part in parts for one in collect_local_parameters(part, owned)]
        self._copies = ReplicatedGradients.of(self.local_parameters, layout, groups)
        self._spans = layout.spans(runtime.rank, recipe.data.sequence_length)
        wide = torch.promote_types(self.local_parameters[0].tensor.dtype, torch.float32)
        self._zero = torch.zeros((), dtype=wide, device=self._device)  # where losses and norms begin
        self._pipeline = self._build_pipeline() if groups.pipeline is not None else None

    def _build_pipeline(self) -> "Pipeline":
        # Imported where there is a pipeline: torch's schedules load its compiler, which takes most of a second.
        with host_values():  # modules of torch make tensors of their own when they are loaded
            from hlat.parallel.pipeline_parallel import Pipeline  # noqa: PLC0415

        recipe, layout = self._recipe, self.layout
        assert self.groups.pipeline is not None, "there is a pipeline"
        positions = recipe.data.sequence_length // layout.context
        handed = positions // layout.tensor if layout.sequence_parallel else positions
        return Pipeline(
            self.stages,
            layout,
            self._rank,
            self.groups.pipeline,
            (recipe.batch.micro_batch, handed, recipe.model.hidden_size),
            self.stages[0].compute or self.parameters[0].dtype,
            positions,
            self._device,
        )

    @property
    def rows(self) -> range:
        """Which sequences of a global batch this rank takes."""
        return self.layout.rows(self._rank, self._recipe.batch.global_batch)

    @property
    def data_index(self) -> int:
        """This rank's place on the data axis."""
        return self._place.dp

    @property
    def is_model_parallel_leader(self) -> bool:
        """Whether this rank speaks for all that work on the same sequences: one of them does."""
        return (self._place.pp, self._place.cp, self._place.tp) == (0, 0, 0)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer steps."""
        return [one.parameter for one in self.local_parameters]

    def stored_parameters(self) -> Iterator[torch.Tensor]:
        """The parameters, or shards of them, that this rank has between steps."""
        yield from (one.tensor for one in self.local_parameters)
        for part in self.stages:
            yield from sharded_parameters(part)

    def gathered_parameters(self) -> Iterator[torch.Tensor]:
        """What parameters are gathered into where they are sharded; storages that are empty in between."""
        for part in self.stages:
            yield from gathered_parameters(part)

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that there are, whole or shards, on this rank."""
        yield from (one.gradient for one in self.local_parameters if one.gradient is not None)
        for part in self.stages:
            yield from unsharded_gradients(part)

    def accumulate_gradients(
        self, inputs_BS: torch.Tensor, labels_BS: torch.Tensor, positions_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Leave in ``.grad`` the gradient of the mean loss over the global batch; returns this rank's term of it.

        Args:
            inputs_BS, labels_BS: the sequences ``rows`` of the global batch, whole, int64, on the CPU.
            positions_BS: place of each token in its document, likewise, where the recipe isolates documents.

        Returns:
            A detached scalar; the terms of all ranks add up to the mean loss in nats.
        """
        enter_phase("forward")
        tokens = self._count(labels_BS)
        local = self._local(MicroBatch(inputs_BS, labels_BS, positions_BS))
        if self._pipeline is not None:
            loss = self._pipeline.train(local, tokens)
        else:
            loss = self._train_micro_batches(local.split(self._recipe.batch.micro_batch), tokens)
        enter_phase("reduce")
        if self.groups.gradients is not None and self.groups.shard_mesh is None:
            all_reduce_gradients(self.local_parameters, self.groups.gradients)
        self._copies.all_reduce()
        return loss if self._place.tp == 0 else torch.zeros_like(loss)

    def _count(self, labels_BS: torch.Tensor) -> torch.Tensor | int:
        """Labelled tokens of the global batch; stays on the device where other ranks have to be asked."""
        with host_values():
            here = int((labels_BS != IGNORED).sum())
        if self.groups.data is None:
            return here
        tokens = torch.tensor(here, device=self._device)
        dist.all_reduce(tokens, group=self.groups.data)
        return tokens

    def _local(self, batch: MicroBatch) -> MicroBatch:
        """The positions of some sequences that this rank has, on its device."""
        places = batch.positions_BS
        assert (places is not None) == self._recipe.data.isolate, "what memory and compiled code are planned for"
        with host_values():
            assert places is None or not places[:, 0].any(), "every row begins a document"
        return batch.local(self._spans, self._device)

    def _train_micro_batches(self, batches: Sequence[MicroBatch], tokens: torch.Tensor | int) -> torch.Tensor:
        (model,) = self.stages
        loss = self._zero.clone()
        for number, (inputs, labels, positions) in enumerate(batches, start=1):
            enter_phase("forward")
            configure_micro_batch(model, self.layout.zero, last=number == len(batches))
            part = model(inputs, labels, positions=positions) / tokens
            enter_phase("backward")
            part.backward()
            loss += part.detach()
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """This rank's term of the summed loss over some micro-batches, forward only: float64, in nats.

        Args:
            batches: whole sequences, on the CPU, for this rank's data-parallel index; as many for every rank.
        """
        local = (self._local(batch) for batch in batches)  # one after another: the device holds what is computed now
        if self._pipeline is not None:
            nats = self._pipeline.evaluate(local)
        else:
            nats = torch.zeros((), dtype=torch.float64, device=self._device)
            for inputs, labels, positions in local:
                nats += self.stages[0](inputs, labels, positions=positions).double()
        for part in self.stages:
            reshard(part)
        return nats if self._place.tp == 0 else torch.zeros_like(nats)

    @torch.no_grad()
    def reduce_loss_and_norm(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss over the global batch and the L2 norm of its gradient, each parameter counted once: scalars."""
        gradients = [
            row for one in self.local_parameters if one.gradient is not None for row in owned_rows(one, one.gradient)
        ]
        squares = sum_of_squares(gradients, self._zero)
        total = sum_over_world(torch.stack((loss.to(squares.dtype), squares)), self.layout.world)
        return total[0], total[1].sqrt()

    @torch.no_grad()
    def parameter_norm(self) -> torch.Tensor:
        """L2 norm over all parameters, each counted once: a scalar."""
        rows = [row for one in self.local_parameters for row in owned_rows(one, one.tensor)]
        return sum_over_world(sum_of_squares(rows, self._zero).reshape(1), self.layout.world)[0].sqrt()

    @torch.no_grad()
    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in place."""
        return sum_over_world(values, self.layout.world)

    @torch.no_grad()
    def clip_gradients(self, norm: torch.Tensor, limit: float) -> None:
        """Scale the gradients in place by min(1, limit / norm)."""
        clip([one.gradient for one in self.local_parameters if one.gradient is not None], norm, limit)


def build_parallel(
    recipe: Recipe, runtime: Runtime, seed: int | None, dtype: torch.dtype | None = None
) -> ParallelModel:
    """Build this rank's share of a model in the recipe's layout.

    Args:
        recipe: validated for this number of processes.
        runtime: this process.
        seed: of the initial weights; None leaves them uninitialised, to be loaded.
        dtype: of the weights; None for that of the precision mode.

    Raises:
        LaunchError: this device cannot do what the recipe asks for.
    """
    mode = MODES[recipe.precision.mode]
    if dtype is not None:
        mode = replace(mode, weights=dtype, compute=dtype if mode.compute == mode.weights else mode.compute)
    if recipe.precision.mode == "fp8":
        check_fp8(runtime.device)
    if recipe.data.isolate:
        check_isolation(runtime.device)
    step = StepShape.of(recipe, runtime.world)
    layout = step.layout
    with host_values():  # meshes look at the ranks in them
        groups = create_process_groups(layout, runtime.rank, recipe.model, runtime.device)
    shares = rank_model_shards(step, runtime.rank)
    parts = [_build_part(recipe, layout, groups, runtime, share, mode) for share in shares]
    model = ParallelModel(recipe, runtime, layout, groups, parts)
    if seed is not None:
        initialise(model.local_parameters, recipe.model, seed)
    return model


def _build_part(
    recipe: Recipe, layout: Layout, groups: ProcessGroups, runtime: Runtime, part: ModelShard, mode: Mode
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(recipe.model, part)
    replace_parameters(model, lambda parameter: parameter.to(mode.weights))
    model.compute = mode.compute
    if recipe.precision.mode == "fp8":
        for block in model.blocks():
            convert_to_fp8(block)
    if groups.tensor is not None:
        for block in model.blocks():
            parallelize_block(block, groups.tensor, layout.sequence_parallel)
        parallelize_embedding_and_head(model, groups.tensor, layout.sequence_parallel)
    if groups.context is not None:
        with host_values():
            from hlat.parallel.context_parallel import ContextParallelCore  # noqa: PLC0415  (loads torch's compiler, as the pipeline does)

        for block in model.blocks():
            block.attention.core = ContextParallelCore(groups.context)
    if runtime.world > 1:
        model.spans = layout.spans(runtime.rank, recipe.data.sequence_length)
    if decide_compilation(recipe, runtime.device, runtime.world).on:
        compile_blocks(model)
    place = layout.coordinates(runtime.rank)
    checkpoint_activations(model, plan_activations(recipe, part, runtime.world, place.pp, runtime.device.type))
    if groups.shard_mesh is not None:
        shard_model(model, groups.shard_mesh, layout.zero, mode)
        model.to_empty(device=runtime.device)
    else:
        replace_parameters(model, lambda parameter: torch.empty_like(parameter, device=runtime.device))
    return model
