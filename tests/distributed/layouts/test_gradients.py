"""Gradients in mixed precision are added up over ranks in fp32; ranks that share a loss go through it in step."""

from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.parallel import build_parallel
from hlat.runtime.distributed import Runtime
from hlat.training import accumulate_gradients
from tests.support.distributed.jobs import Block, assemble, batch_of, blocks, global_batch
from tests.support.distributed.layouts import ODD, Case, recipe_content
from tests.support.distributed.workers import Pool

EMBEDDING = "model.embed_tokens.weight"
ENDS = (EMBEDDING, "lm_head.weight")
MIXED = {"precision": {"mode": "mixed"}}


def gradients(runtime: Runtime, content: dict[str, Any]) -> list[Block]:
    """This rank's share of the gradient of one batch."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    accumulate_gradients(model, batch_of(model, recipe, 1))
    return blocks(model.local_parameters, gradients=True)


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
def test_in_mixed_precision_the_ranks_add_up_in_fp32(case: Case, pool: Pool) -> None:
    """One process adds up two micro-batches of four sequences in fp32, two ranks one such micro-batch each: the same
    two numbers, of which there is one sum, so that the bits are the same. bf16 would round it to eight of its bits.
    """
    content = recipe_content(case, **MIXED)
    found = assemble(pool.run(case.world, gradients, content))
    [alone] = pool.run(1, gradients, content | {"parallel": {}})
    expected = assemble([alone])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == found[name].dtype == np.float32
        # Sharded, the two ends are gathered in bf16, and a rank rounds its own gradient of them to bf16 once more than
        # one process does: after adding up the tokens of a row, and after dividing by those of the batch.
        if name not in ENDS or case.parallel["zero"] == 0:
            assert np.array_equal(found[name], values), name
        # Of the sums of two numbers of 8 bits that differ in size about every other has more: of 32 at 3 sigma.
        rows = _rows_of_both(content) if name == EMBEDDING else slice(None)
        assert _beyond_bf16(found[name][rows]) > 0.25, name


def _beyond_bf16(values: np.ndarray) -> float:
    """Share of the numbers that bf16 does not hold."""
    return float((torch.from_numpy(values).bfloat16().float().numpy() != values).mean())


def _rows_of_both(content: dict[str, Any]) -> list[int]:
    """Tokens that both halves of the sequences have."""
    recipe = parse_recipe(content, world=2)
    inputs, _ = global_batch(1, recipe.model.vocab_size, recipe.batch.global_batch, recipe.data.sequence_length)
    first, second = (set(half.flatten().tolist()) for half in inputs.chunk(2))
    return sorted(first & second)


def loss_chunks(runtime: Runtime, content: dict[str, Any]) -> tuple[int, int]:
    """Vocabulary rows that are here, and how many tokens this rank takes through the loss at a time."""
    recipe = parse_recipe(content, world=runtime.world)
    head = build_parallel(recipe, runtime, recipe.training.seed).stages[0].head
    assert head is not None, "there is no pipeline"
    rows = head.matrix.shape[0]
    return rows, head.cross_entropy.chunk(rows)


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_with_more_or_fewer_rows_of_the_vocabulary_take_as_many_tokens_at_a_time(degree: int, pool: Pool) -> None:
    """Each chunk is two collectives: with other chunks on another rank, one of them would wait for ever."""
    found = pool.run(degree, loss_chunks, recipe_content(Case("TP", degree, {"tensor": degree}, dict(ODD))))
    assert len({rows for rows, _ in found}) > 1, "no degree divides 307"
    assert len({chunk for _, chunk in found}) == 1, found
