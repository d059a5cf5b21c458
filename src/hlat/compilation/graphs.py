"""Compile the graphs of a run: this process builds its part of the model and computes once what a run computes.

    recipe, rank -> model without weights of its own, optimizer -> a step on dummy tokens -> what a save and a line of
        metrics compute -> forward passes of an evaluation

Nothing is written but the compilers' cache. It is the program of training, not an imitation, so that the compilers see
the same code, shapes and process groups. Blocks are compiled in one forward and backward pass and in one forward pass;
on devices that compile single operations too, these are those of a whole step.
"""

import numpy as np
import torch

from hlat.checkpoint import collect, find_saved_recipe
from hlat.config import Recipe
from hlat.data import Batch
from hlat.model import next_tokens, row_losses
from hlat.parallel import MicroBatch, ParallelModel, build_parallel, decide_compilation
from hlat.resilience import APPLY
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError
from hlat.training import (
    StepEnd,
    accumulate_gradients,
    requested_components,
    requested_optimizer,
    resolve_determinism,
    resolve_precision,
    update,
)

_MICRO_BATCHES = 2  # the first gradient of a step is stored, every later one is added


def compile_graphs(recipe: Recipe, runtime: Runtime) -> None:
    """Compile everything that the processes of a run compile, in all of its stages. Collective.

    LaunchError: the run compiles nothing, or cannot run here.
    """
    # A resumed run keeps precision mode and determinism of its newest checkpoint.
    saved_recipe = runtime.ranks.run_on_rank0(lambda: find_saved_recipe(recipe.run_dir))
    resolved, _ = resolve_precision(recipe, runtime, saved_recipe)
    recipe = resolve_determinism(resolved, runtime, saved_recipe)
    # Each stage has its own shapes and layout. Without its place it is a recipe of which any step can be computed.
    stages = [stage.placed(None) for stage in recipe.each_stage()]
    decisions = [decide_compilation(stage, runtime.device, runtime.world) for stage in stages]
    if not any(decision.on for decision in decisions):
        raise LaunchError(
            f"{recipe.run.name}: there is nothing to compile, as the run does not compile its blocks: "
            f"{decisions[0].reason}. Train without this step, or set run.compile=blocks here and for training."
        )
    for stage, decision in zip(stages, decisions, strict=True):
        if decision.on:
            _compile(stage, runtime)


def _compile(recipe: Recipe, runtime: Runtime) -> None:
    model = build_parallel(recipe, runtime, seed=None)
    with torch.no_grad():
        for parameter in model.stored_parameters():
            # Uninitialised memory may hold NaN; the dummy step should compute finite numbers.
            parameter.zero_()
    _train_once(recipe, model)
    _evaluate_once(recipe, model)


def _train_once(recipe: Recipe, model: ParallelModel) -> None:
    optimizer = requested_optimizer(recipe, model)
    components = requested_components(recipe, model.local_parameters)
    components.reset()
    loss = accumulate_gradients(model, _training_batch(recipe, model))
    result = update(model, optimizer, recipe, 1, loss, lambda loss, norm: APPLY)
    components.after_step(StepEnd(1, result, is_last=False))
    # A line of metrics has this norm.
    model.parameter_norm()
    for chunk in collect(recipe.model, model.local_parameters, optimizer, components.state()):
        for rows in chunk.rows:  # as they are staged
            rows.detach().cpu()


def _evaluate_once(recipe: Recipe, model: ParallelModel) -> None:
    batch = _micro_batch(recipe, recipe.batch.micro_batch)
    model.evaluate([batch])
    if recipe.evaluation.tasks:
        model.evaluate_rows([batch], row_losses)
    if recipe.evaluation.prompts:
        # As many prompts as fall on a data rank: the shape is part of the compiled code.
        rows = min(recipe.batch.micro_batch, -(-len(recipe.evaluation.prompts) // model.data_ranks))
        model.evaluate_rows([_micro_batch(recipe, rows)], next_tokens)


def _training_batch(recipe: Recipe, model: ParallelModel) -> Batch:
    """This rank's sequences of a step, of token 0."""
    rows = len(model.rows(recipe.batch.global_batch))
    # The schedule of a pipeline depends on the number of sequences: all of them there.
    if model.groups.pipeline is None:
        rows = min(rows, _MICRO_BATCHES * recipe.batch.micro_batch)
    batch = _micro_batch(recipe, rows)
    return Batch(batch.inputs_BS, batch.labels_BS, np.arange(rows), batch.positions_BS)


def _micro_batch(recipe: Recipe, rows: int) -> MicroBatch:
    """Sequences of token 0, one document each."""
    shape = (rows, recipe.data.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.arange(shape[1]).expand(shape).contiguous() if recipe.data.isolate else None
    return MicroBatch(tokens, tokens.clone(), positions)
