"""Every gradient is that of one process, reduced in fp32 in mixed precision; loss chunks are equal on all ranks."""

from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients
from tests.support.distributed.comparing import bound
from tests.support.distributed.jobs import Block, assemble, batch_of, blocks, global_batch
from tests.support.distributed.layouts import CASES, ODD, Case, recipe_content
from tests.support.distributed.workers import Pool

EMBEDDING = "model.embed_tokens.weight"
ENDS = (EMBEDDING, "lm_head.weight")
MIXED = {"precision": {"mode": "mixed"}}


def gradients(runtime: Runtime, content: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[Block]:
    """Compute this rank's blocks of the gradient of one batch."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, dtype)
    accumulate_gradients(model, batch_of(model, recipe, 1))
    return blocks(model.local_parameters, gradients=True)


SUMMED = (
    "TP2, q and k norms, odd vocabulary",
    "TP4 + SP, q and k norms, odd vocabulary",
    "TP4 + SP, 2 kv heads",
    "TP4 + SP, 2 kv heads, norms after",
    "TP2 + SP x PP2, sliding window",
    "PP2, tied",
    "PP2 zbv, tied: both ends on one rank",
)
"""Layouts in which every kind of ``GradientSum`` is needed, or must not be made."""


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SUMMED], ids=str)
def test_every_gradient_is_that_of_one_process(case: Case, pool: Pool) -> None:
    """A term that is left out, or a gradient that is summed although it is complete, is found by the tensor's name."""
    content = recipe_content(case)
    found = assemble(pool.run(case.world, gradients, content, torch.float64))
    [alone] = pool.run(1, gradients, content | {"parallel": {}}, torch.float64)
    expected, limit = assemble([alone]), bound(case, torch.float64, 1)
    wrong = {
        name: distance
        for name, values in expected.items()
        if (distance := float(np.linalg.norm(found[name] - values) / np.linalg.norm(values))) > limit
    }
    assert found.keys() == expected.keys() and not wrong


@pytest.mark.parametrize(
    "case",
    [
        Case("DP2, ZeRO 0", 2, {"zero": 0}, micro_batch=4),
        Case("DP2, ZeRO 1", 2, {"zero": 1}, micro_batch=4),
        Case("DP2, ZeRO 2", 2, {"zero": 2}, micro_batch=4),
        Case("DP2, ZeRO 3", 2, {"zero": 3}, micro_batch=4),
    ],
    ids=str,
)
def test_gradients_are_reduced_in_fp32_in_mixed_precision(case: Case, pool: Pool) -> None:
    """One process accumulates two micro-batches of four sequences, two ranks reduce one such micro-batch each.

    Both sum the same two fp32 numbers, so the bits are equal. A bf16 sum would be rounded to eight bits.
    """
    content = recipe_content(case, **MIXED)
    found = assemble(pool.run(case.world, gradients, content))
    [alone] = pool.run(1, gradients, content | {"parallel": {}})
    expected = assemble([alone])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == found[name].dtype == np.float32
        # If sharded, embedding and head are gathered in bf16, and a rank rounds their gradient to bf16 once more than
        # a single process: after summing over the tokens of a row, and after dividing by the tokens of the batch.
        if name not in ENDS or case.parallel["zero"] == 0:
            assert np.array_equal(found[name], values), name
        # About half of the sums of two 8-bit numbers of different size need more bits: of 32 sums at 3 sigma.
        rows = _rows_of_both(content) if name == EMBEDDING else slice(None)
        assert _beyond_bf16(found[name][rows]) > 0.25, name


def _beyond_bf16(values: np.ndarray) -> float:
    """Fraction of the numbers that bf16 cannot represent."""
    return float((torch.from_numpy(values).bfloat16().float().numpy() != values).mean())


def _rows_of_both(content: dict[str, Any]) -> list[int]:
    """Return the tokens that occur in both halves of the sequences."""
    recipe = parse_recipe(content, world=2)
    inputs, _ = global_batch(1, recipe.model.vocab_size, recipe.batch.global_batch, recipe.data.sequence_length)
    first, second = (set(half.flatten().tolist()) for half in inputs.chunk(2))
    return sorted(first & second)


def loss_chunks(runtime: Runtime, content: dict[str, Any]) -> tuple[int, int]:
    """Return the number of local vocabulary rows, and of tokens in a chunk of the loss."""
    recipe = parse_recipe(content, world=runtime.world)
    head = build_parallel(recipe, runtime, recipe.training.seed).stages[0].head
    assert head is not None, "there is no pipeline"
    rows, width = head.matrix.shape
    return rows, head.cross_entropy.chunk(rows, width)


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_with_different_numbers_of_vocabulary_rows_use_equal_chunks(degree: int, pool: Pool) -> None:
    """Each chunk takes two collectives: with different chunks, a rank would wait forever."""
    found = pool.run(degree, loss_chunks, recipe_content(Case("TP", degree, {"tensor": degree}, dict(ODD))))
    assert len({rows for rows, _ in found}) > 1, "no degree divides 307"
    assert len({chunk for _, chunk in found}) == 1, found
