"""Parallel model: one rank's stages of a model, and the collective operations to train and evaluate it.

    recipe, layout, rank -> this rank's stages on the meta device -> tensor, sequence, context parallelism attached
        -> compiled, activation checkpointing -> sharded by FSDP2 -> memory allocated for this rank -> initial weights

A single process is a layout like any other: nothing is attached, and the model is the plain decoder.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, cached_property, partial, reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hlat.activation_checkpointing import checkpoint_activations, plan_activations
from hlat.config import Recipe
from hlat.model import (
    IGNORED,
    Decoder,
    ModelShard,
    Reduction,
    allocate,
    collect_local_parameters,
    head_loss,
    initialise,
    loss_terms,
    replace_parameters,
    row_losses,
)
from hlat.optim import LocalMatrices, WholeMatrices
from hlat.parallel.data_parallel import (
    MicroBatch,
    ReplicatedGradients,
    configure_micro_batch,
    gathered_parameters,
    gradients_of,
    owned_rows,
    pass_label,
    reshard,
    shard_model,
    sharded_parameters,
    sum_of_squares,
    sum_on_host,
    sum_over_world,
    unsharded_gradients,
)
from hlat.parallel.device_support import compile_blocks, decide_compilation, device_problems, needs_whole_matrices
from hlat.parallel.layout import Layout, StepShape
from hlat.parallel.matrix_exchange import MatrixExchange, MatrixPlan
from hlat.parallel.process_groups import ProcessGroups, all_reduce_together, create_process_groups, try_groups
from hlat.parallel.stages.stage_layers import rank_model_shards
from hlat.parallel.tensor_parallel import parallelize
from hlat.precision import MODES, Mode, convert_to_fp8
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime, host_values, in_fake_world
from hlat.runtime.errors import LaunchError
from hlat.runtime.progress import enter_phase

if TYPE_CHECKING:
    from hlat.parallel.pipeline_parallel import Pipeline


class ParallelModel:
    """One rank's shard of a model, and collective operations on the model; all ranks have to call these together."""

    def __init__(
        self, recipe: Recipe, runtime: Runtime, layout: Layout, groups: ProcessGroups, stages: list[Decoder]
    ) -> None:
        # Stages of this rank, ascending; without a pipeline one, with all layers.
        self.layout, self.groups, self.stages = layout, groups, stages
        self.config = recipe.model
        self._recipe, self._device, self._rank, self._ranks = recipe, runtime.device, runtime.rank, runtime.ranks
        self._world, self._zero_stage = layout.world, layout.zero
        # Indices of the sequences that this rank computes, of a global batch of a size; asked for every batch
        self.rows: Callable[[int], range] = cache(partial(layout.rows, runtime.rank))
        here = layout.coordinates(runtime.rank)
        self._coordinates = here
        # FSDP2 itself decides which rank owns a shard; replicated parameters are owned by the first rank that has them.
        owned = (here.dp == 0 and here.cp == 0) or groups.shard_mesh is not None
        self.local_parameters = [each for stage in stages for each in collect_local_parameters(stage, owned)]
        self._multipliers = [each.scale(recipe.optimizer).multiplier for each in self.local_parameters]
        self._replicated = ReplicatedGradients.of(self.local_parameters, layout, groups)
        # Batches have values in a rehearsal too, whose other tensors have none
        self._reading_values: Callable[[], AbstractContextManager[None]] = (
            host_values if in_fake_world() else nullcontext
        )
        self._spans = layout.spans(runtime.rank, recipe.data.sequence_length)
        wide = torch.promote_types(self.local_parameters[0].tensor.dtype, torch.float32)
        self._zero = torch.zeros((), dtype=wide, device=self._device)  # initial value of losses and norms
        self._pipeline = self._build_pipeline() if groups.pipeline is not None else None

    def _build_pipeline(self) -> "Pipeline":
        # Imported only if there is a pipeline: torch's schedules import its compiler, which takes most of a second.
        with host_values():  # torch modules create tensors when they are imported
            from hlat.parallel.pipeline_parallel import Pipeline  # noqa: PLC0415

        recipe, layout = self._recipe, self.layout
        assert self.groups.pipeline is not None, "there is a pipeline"
        positions = recipe.data.sequence_length // layout.context
        sent = positions // layout.tensor if layout.sequence_parallel else positions
        return Pipeline(
            self.stages,
            layout,
            self._rank,
            self.groups.pipeline,
            (recipe.batch.micro_batch, sent, recipe.model.hidden_size),
            self.stages[0].compute or self.parameters[0].dtype,
            positions,
            self._device,
        )

    @property
    def data_ranks(self) -> int:
        return self.layout.data

    @property
    def isolates(self) -> bool:
        return self._recipe.data.isolate

    @property
    def data_index(self) -> int:
        return self._coordinates.dp

    @property
    def is_model_parallel_leader(self) -> bool:
        """True for one of the ranks that compute the same sequences; only it reports values that all of them have."""
        return (self._coordinates.pp, self._coordinates.cp, self._coordinates.tp) == (0, 0, 0)

    @cached_property
    def matrices(self) -> WholeMatrices:
        if self.groups.matrices is None:
            return LocalMatrices()
        step = StepShape.of(self._recipe, self.layout.world)
        layers = [layer for stage in self.stages for layer in stage.shard.layer_range(self.config)]
        return MatrixExchange(MatrixPlan(step, self._rank, layers), self.groups.matrices)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [each.parameter for each in self.local_parameters]

    def stored_parameters(self) -> Iterator[torch.Tensor]:
        """Iterate over the parameters, or shards of them, that this rank stores between steps."""
        yield from (each.tensor for each in self.local_parameters)
        for stage in self.stages:
            yield from sharded_parameters(stage)

    def gathered_parameters(self) -> Iterator[torch.Tensor]:
        """Iterate over the tensors that sharded parameters are gathered into; their storages are empty in between."""
        for stage in self.stages:
            yield from gathered_parameters(stage)

    def gradients(self) -> Iterator[torch.Tensor]:
        yield from gradients_of(self.local_parameters)
        for stage in self.stages:
            yield from unsharded_gradients(stage)

    def accumulate_gradients(
        self, inputs_BS: torch.Tensor, labels_BS: torch.Tensor, positions_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over the global batch in ``.grad``; return this rank's loss term.

        Inputs, labels (their next tokens) and positions are int64 on the CPU, of the complete sequences ``rows(size)``
        of the global batch; positions within documents are given if the recipe has data.isolate=true. The term is a
        detached scalar; those of all ranks add up to the mean loss in nats.
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
            all_reduce_together(gradients_of(self.local_parameters), self.groups.gradients)
        self._replicated.all_reduce()
        # Tensor ranks compute the same loss: one of them has it, so that a sum over all ranks is right.
        return loss if self._coordinates.tp == 0 else torch.zeros_like(loss)

    def _count(self, labels_BS: torch.Tensor) -> torch.Tensor | int:
        """Labelled tokens of the global batch; a device tensor if it is a sum over ranks."""
        with self._reading_values():
            count = int((labels_BS != IGNORED).sum())
        if self.groups.data is None:
            return count
        # int32: some devices have no collectives of int64. Recipes with 2^31 tokens per step are refused.
        # A blocking copy would wait for the update of the previous step; one from unpinned memory may.
        pinned = backend_of(self._device).pins_memory and not in_fake_world()
        on_host = torch.tensor(count, dtype=torch.int32, pin_memory=pinned)
        tokens = on_host.to(self._device, non_blocking=True)
        dist.all_reduce(tokens, group=self.groups.data)
        return tokens

    def _local(self, batch: MicroBatch) -> MicroBatch:
        """Select this rank's positions of complete sequences, on its device."""
        positions = batch.positions_BS
        assert (positions is not None) == self._recipe.data.isolate, "memory and compiled code depend on it"
        with self._reading_values():
            assert positions is None or not positions[:, 0].any(), "every row starts a document"
        return batch.local(self._spans, self._device)

    def _train_micro_batches(self, batches: Sequence[MicroBatch], tokens: torch.Tensor | int) -> torch.Tensor:
        (model,) = self.stages
        loss = self._zero.clone()
        for number, (inputs, labels, positions) in enumerate(batches, start=1):
            enter_phase("forward")
            configure_micro_batch(model, self._zero_stage, last=number == len(batches))
            with pass_label("forward", 0, number - 1):
                term = model(inputs, labels, positions=positions) / tokens
            enter_phase("backward")
            with pass_label("backward", 0, number - 1):
                term.backward()
            loss += term.detach()
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Compute this rank's term of the summed loss over complete CPU sequences of its data index, in nats.

        Returns a float64 scalar on the CPU.
        """
        # Collective: every rank has the same number of micro-batches.
        losses = list(self._losses(batches))
        # On the CPU, with one rounding, because some devices have no float64.
        return sum_on_host(losses if self._coordinates.tp == 0 else [])

    @torch.no_grad()
    def evaluate_rows(self, batches: Sequence[MicroBatch], reduction: Reduction = row_losses) -> torch.Tensor:
        """Compute this rank's terms of a number for each row, such as its summed loss in nats; forward only.

        Batches are complete CPU sequences of this rank's data index, of one shape, as many on every rank; they may be
        shorter than the recipe's, in steps of ``row_multiple``. Returns (rows,), float64 on the CPU: the number is the
        sum over the ranks of a data index.
        """
        rows = [len(batch.labels_BS) for batch in batches]
        values = torch.zeros(sum(rows), dtype=torch.float64)
        with self._row_length(batches[0].labels_BS.shape[1] if batches else self._recipe.data.sequence_length):
            found = list(self._losses(batches, reduction))
        if found and self._coordinates.tp == 0:
            values.copy_(torch.cat(found).cpu())
        return values

    @property
    def row_multiple(self) -> int:
        """Number of tokens of which the length of evaluated rows is a multiple."""
        # Compiled blocks take one length.
        if decide_compilation(self._recipe, self._device, self.layout.world).on:
            return self._recipe.data.sequence_length
        # Two chunks for each context rank, which tensor ranks may shard.
        return 2 * self.layout.context * self.layout.tensor

    @contextmanager
    def _row_length(self, length: int) -> Iterator[None]:
        saved = self._spans, [stage.spans for stage in self.stages]
        self._spans = self.layout.spans(self._rank, length)
        for stage in self.stages:
            stage.spans = None if stage.spans is None else self._spans
        try:
            yield
        finally:
            self._spans, spans = saved
            for stage, before in zip(self.stages, spans, strict=True):
                stage.spans = before

    def _losses(self, batches: Sequence[MicroBatch], reduction: Reduction = head_loss) -> Iterator[torch.Tensor]:
        """The loss of each micro-batch, or another reduction of it, if this rank has the last stage."""
        local = (self._local(batch) for batch in batches)  # lazily: only the current micro-batch is on the device
        if self._pipeline is not None:
            yield from self._pipeline.evaluate(local, reduction=reduction)
        else:
            for inputs, labels, positions in local:
                yield self.stages[0](inputs, labels, positions=positions, reduction=reduction)
        # FSDP2 frees gathered parameters in a backward pass, and there is none.
        for stage in self.stages:
            reshard(stage)

    @torch.no_grad()
    def reduce_loss_and_norm(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the mean loss over the global batch and the L2 norm of its gradient, both scalars, over all ranks."""
        # By multiplier: the gradient by W is that by W' = multiplier * W, which is stored, times the multiplier.
        gradients: dict[float, list[torch.Tensor]] = {1.0: []}
        for each, multiplier in zip(self.local_parameters, self._multipliers, strict=True):
            if (gradient := each.gradient) is not None:  # of a DTensor it is made with each reading
                gradients.setdefault(multiplier, []).extend(owned_rows(each, gradient))
        terms = [sum_of_squares(rows, self._zero) * multiplier**2 for multiplier, rows in gradients.items()]
        squares = reduce(torch.add, terms)
        # Both in one message
        total = sum_over_world(torch.stack((loss.to(squares.dtype), squares)), self._world)
        return total[0], total[1].sqrt()

    @torch.no_grad()
    def parameter_norm(self) -> torch.Tensor:
        """Compute the L2 norm over all parameters of all ranks, each counted once: a scalar."""
        rows = [row for each in self.local_parameters for row in owned_rows(each, each.tensor)]
        return sum_over_world(sum_of_squares(rows, self._zero).reshape(1), self._world)[0].sqrt()

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all ranks, in place."""
        return self._ranks.all_reduce_sum(values)


def build_parallel(
    recipe: Recipe, runtime: Runtime, seed: int | None, dtype: torch.dtype | None = None
) -> ParallelModel:
    """Build this rank's stages of a model in the layout of a recipe that is valid for this number of processes.

    Without a seed weights stay uninitialised, to be loaded later. ``dtype`` of weights: None for the precision mode's.
    LaunchError: this device does not support what the recipe requires.
    """
    mode = MODES[recipe.precision.mode]
    if dtype is not None:
        mode = replace(mode, weights=dtype, compute=dtype if mode.compute == mode.weights else mode.compute)
    step = StepShape.of(recipe, runtime.world)
    layout = step.layout
    with host_values():  # a device mesh reads the values of its rank tensor
        groups = create_process_groups(layout, runtime.rank, recipe.model, runtime.device, needs_whole_matrices(recipe))
    can_send = groups.pipeline is None or backend_of(runtime.device).can_send(groups.pipeline)
    if problems := device_problems(recipe, runtime.world, runtime.device, can_send):
        raise LaunchError("\n".join(problems))
    if backend_of(runtime.device).group_differs and not in_fake_world():
        try_groups(groups, runtime.device)
    shards = rank_model_shards(step, runtime.rank)
    stages = [_build_stage(recipe, layout, groups, runtime, shard, mode) for shard in shards]
    model = ParallelModel(recipe, runtime, layout, groups, stages)
    if seed is not None:
        initialise(model.local_parameters, recipe.model, seed, recipe.optimizer)
    return model


def _build_stage(
    recipe: Recipe, layout: Layout, groups: ProcessGroups, runtime: Runtime, shard: ModelShard, mode: Mode
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(recipe.model, shard)
    replace_parameters(model, lambda parameter: parameter.to(mode.weights))
    model.compute = mode.compute
    model.longest = recipe.data.sequence_length
    # The order follows the head of this file: hooks are attached to modules before they are compiled and sharded.
    if recipe.precision.mode == "fp8":
        for block in model.blocks():
            convert_to_fp8(block)
    if groups.tensor is not None:
        parallelize(model, groups.tensor, layout.sequence_parallel)
    if model.head is not None:
        model.head.cross_entropy.z_loss = recipe.optimizer.z_loss
        model.head.cross_entropy.terms = loss_terms(recipe.training.loss_terms)
    if groups.context is not None:
        with host_values():
            # Imported late, like the pipeline: it imports torch's compiler.
            from hlat.parallel.context_parallel import ContextParallelCore  # noqa: PLC0415

        for block in model.blocks():
            block.attention.core = ContextParallelCore(groups.context, recipe.data.sequence_length)
    if runtime.world > 1:
        model.spans = layout.spans(runtime.rank, recipe.data.sequence_length)
    # That of the rows, whatever positions this rank has and however long their documents are
    for rope in model.ropes.values():
        rope.length = recipe.data.sequence_length
    if decide_compilation(recipe, runtime.device, runtime.world).on:
        compile_blocks(model, runtime.device)
    pipeline_rank = layout.coordinates(runtime.rank).pp
    plan = plan_activations(recipe, shard, runtime.world, pipeline_rank, runtime.device.type)
    checkpoint_activations(model, plan, backend_of(runtime.device).compile_backend)
    if groups.shard_mesh is not None:
        shard_model(model, groups.shard_mesh, layout.zero, mode)
        model.to_empty(device=runtime.device)
    else:
        allocate(model, runtime.device)
    return model
