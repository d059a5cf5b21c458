"""Inputs that are gathered again in backward: fewer bytes saved, by the formula, and the same bits."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hlat.config.load import parse_recipe
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients
from tests.distributed.memory.test_activation_checkpointing import kept
from tests.support.distributed.jobs import batch_of, train
from tests.support.distributed.layouts import SEQUENCE_LENGTH, Case, recipe_content
from tests.support.distributed.workers import Pool

CASE = Case("TP2 + SP", 2, {"tensor": 2}, micro_batch=4)
TOKENS = CASE.micro_batch * SEQUENCE_LENGTH


def content_of(gather_again: str, **sections: Any) -> dict[str, Any]:
    """Build the recipe of the layout."""
    return recipe_content(CASE, parallel={**CASE.parallel, "gather_again": gather_again}, **sections)


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_each_layer_keeps_two_gathered_inputs_less(policy: str, pool: Pool) -> None:
    """Korthikanti et al. 2022, section 4.2.2: the inputs of both halves of a block, (B, S, D) each.

    The norms before them run again too, so that the fp32 scales of their shard of the tokens are not kept either.
    """
    memory = {"activation_checkpointing": policy}
    again, keeping = (pool.run(CASE.world, kept, content_of(each, memory=memory)) for each in ("always", "never"))
    model = parse_recipe(content_of("auto"), world=CASE.world).model
    of_layer = 2 * TOKENS * model.hidden_size * 4 + 2 * TOKENS // CASE.world * 4
    for ours, theirs in zip(again, keeping, strict=True):
        assert theirs[0] - ours[0] == model.layers * of_layer


def compiled_step(runtime: Runtime, content: dict[str, Any]) -> tuple[float, int, int, int]:
    """Run a step with compiled blocks; a job of the pool.

    Returns:
        Loss; tensors saved for backward that have the width of the model and all tokens; graphs; breaks of graphs.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    complete = torch.Size((TOKENS, recipe.model.hidden_size))
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1] == complete[-1] and tensor.numel() == complete.numel():
            found.append(tensor)  # kept, so that no later tensor has its address
        return tensor

    with saved_tensors_hooks(see, lambda tensor: tensor):
        loss = accumulate_gradients(model, batch_of(model, recipe, 1))
    inputs = len({tensor.data_ptr() for tensor in found})
    return float(loss), inputs, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_compiled_blocks_gather_again(pool: Pool) -> None:
    """One graph without a break, which saves no complete input; what remains is the head's, outside of the graph."""
    run = {"compile": "blocks"}
    again, keeping = (pool.run(CASE.world, compiled_step, content_of(each, run=run)) for each in ("always", "never"))
    recipe = parse_recipe(content_of("auto"), world=CASE.world)
    passes = recipe.micro_batches(CASE.world)
    for ours, theirs in zip(again, keeping, strict=True):
        assert ours[0] == theirs[0]
        assert ours[2:] == theirs[2:] == (1, 0)
        assert theirs[1] - ours[1] == 2 * recipe.model.layers * passes and ours[1] == passes, (ours, theirs)


def test_gathering_again_gives_the_same_bits(pool: Pool) -> None:
    again, keeping = (pool.run(CASE.world, train, content_of(each), 3) for each in ("always", "never"))
    for ours, theirs in zip(again, keeping, strict=True):
        assert (ours.losses, ours.gradient_norms) == (theirs.losses, theirs.gradient_norms)
        for block, same in zip(ours.final, theirs.final, strict=True):
            assert block[:3] == same[:3] and (block[3] == same[3]).all(), block[0]
