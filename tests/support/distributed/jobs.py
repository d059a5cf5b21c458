"""Jobs for the processes of the pool: train in a layout and return results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.data.samples.training_data import Batch
from hlat.model import IGNORED, LocalParameter
from hlat.optim import build_optimizer
from hlat.parallel import MicroBatch, ParallelModel, build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update

Block = tuple[str, int, int, np.ndarray]
"""Canonical name, first row, first column, values."""


@dataclass
class Trained:
    """Results of one rank."""

    losses: list[float]
    gradient_norms: list[float]
    parameter_norm: float
    validation: float  # summed loss of the sequences of step 0, forward only
    initial: list[Block]
    final: list[Block]


def global_batch(step: int, vocabulary: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step, the same on every rank; some labels are missing, in one sequence all of them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocabulary, (size, length + 1), generator=generator)
    # a pattern to learn, so that gradients are not only noise: every third token repeats the one before
    tokens[:, 2::3] = tokens[:, 1::3][:, : tokens[:, 2::3].shape[1]]
    labels = tokens[:, 1:].clone()
    labels[: size // 3, :7] = IGNORED
    labels[size // 2] = IGNORED
    return tokens[:, :-1], labels


def documents(step: int, size: int, length: int) -> list[list[int]]:
    """Document lengths of each row of a step: one that fills the row, many of one token, some of random length."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = [[length], [1] * (length // 4) + [length - length // 4]]
    while len(rows) < size:
        ends = torch.randperm(length - 1, generator=generator)[: len(rows)].add(1).sort().values
        rows.append(torch.diff(ends, prepend=ends.new_tensor([0]), append=ends.new_tensor([length])).tolist())
    return rows[:size]


def document_positions(rows: list[list[int]]) -> torch.Tensor:
    """Positions of tokens within documents, (B, S)."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def batch_of(model: ParallelModel, recipe: Recipe, step: int) -> Batch:
    """This rank's sequences of a step."""
    size = len(recipe.batches.batch(step - 1)) if step else recipe.batch.global_batch
    length = recipe.data.sequence_length
    inputs, labels = global_batch(step, recipe.model.vocab_size, size, length)
    rows = model.rows(size)
    here = slice(rows.start, rows.stop)
    positions = document_positions(documents(step, size, length))[here] if recipe.data.isolate else None
    return Batch(inputs[here], labels[here], np.asarray(rows), positions)


def blocks(held: list[LocalParameter], gradients: bool = False) -> list[Block]:
    """Collect the weights that this rank owns, or their gradients, as blocks of canonical tensors."""
    found = []
    for one in held:
        values_here = one.gradient if gradients else one.tensor
        assert values_here is not None, "every parameter has had a gradient"
        for piece in one.row_blocks():
            if one.owned and piece.owned:
                values = torch.cat(one.row_views(piece, values_here)).clone().numpy()
                found.append((piece.name, piece.canonical_start, one.layout.first_column, values))
    return found


def train(runtime: Runtime, content: dict[str, Any], steps: int, dtype: torch.dtype = torch.float32) -> Trained:
    """Train some steps on synthetic tokens."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, dtype)
    optimizer = build_optimizer(
        model.local_parameters, recipe.optimizer, recipe.precision.mode, matrices=model.matrices
    )
    initial = blocks(model.local_parameters)
    losses, norms = [], []
    for step in range(1, steps + 1):
        term = accumulate_gradients(model, batch_of(model, recipe, step))
        result = update(model, optimizer, recipe, step, term)
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
    return Trained(
        losses, norms, float(model.parameter_norm()), validate(model, recipe), initial, blocks(model.local_parameters)
    )


def validate(model: ParallelModel, recipe: Recipe) -> float:
    """Summed loss of the sequences of step 0, forward only."""
    batch = batch_of(model, recipe, 0)
    whole = MicroBatch(batch.inputs_BS, batch.labels_BS, batch.positions_BS)
    return float(model.sum_over_world(model.evaluate(whole.split(recipe.batch.micro_batch))))


def assemble(parts: list[list[Block]]) -> dict[str, np.ndarray]:
    """Assemble canonical tensors from the blocks of all ranks; every element has to come from exactly one rank."""
    everything = [block for part in parts for block in part]
    ends: dict[str, list[int]] = {}
    for name, row, column, values in everything:
        shape = [row + values.shape[0], *([column + values.shape[1]] if values.ndim == 2 else [])]
        ends[name] = [max(a, b) for a, b in zip(ends.get(name, shape), shape, strict=True)]
    whole = {name: np.full(shape, np.nan, everything[0][3].dtype) for name, shape in ends.items()}
    for name, row, column, values in everything:
        place = (slice(row, row + values.shape[0]),)
        if values.ndim == 2:
            place += (slice(column, column + values.shape[1]),)
        assert np.isnan(whole[name][place]).all(), f"{name}: two ranks own the same element"
        whole[name][place] = values
    assert not any(np.isnan(values).any() for values in whole.values()), "an element that nobody owns"
    return whole
