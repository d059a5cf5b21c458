"""Compiled blocks recompute inside of their graph, by the same plan, applied before or after."""

import shutil

import pytest
import torch
from small import config_of, model_of, tokens

from hlat.memory import Plan, checkpoint_activations
from hlat.model import Decoder, activations

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")

CHOICE = frozenset({"inner", "gate_up", "attention_input"})
EXTRA = 8192  # bytes per block: torch keeps the state of the CPU's random generator, though told not to


def compiled(order: str) -> Decoder:
    model = model_of(config_of("coalesced"), "fp32", [CHOICE if order == "plan first" else frozenset()] * 2)
    for block in model.blocks():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    if order == "plan last":
        checkpoint_activations(model, Plan("as listed", (CHOICE,) * 2, 0, 1, 0))
    return model


def saved(model: Decoder) -> tuple[torch.Tensor, int]:
    """The loss, and bytes of what is saved for backward beside the parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = tokens()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(ids, ids)
    tables = {t.untyped_storage().data_ptr() for t in model.rope.tables(((0, 1),), ids.device)}
    return loss, sum(one.nbytes() for where, one in kept.items() if where not in known | tables)


def test_a_compiled_block_follows_the_plan() -> None:
    config, results = config_of("coalesced"), []
    plain = model_of(config, "fp32", [frozenset()] * 2)
    saved(plain)[0].backward()
    for order in ("plan first", "plan last"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = compiled(order)
        loss, kept = saved(model)
        loss.backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "two blocks, one graph"
        plan, most = (activations(config, *tokens().shape, "fp32", names).total for names in (CHOICE, ()))
        assert kept <= plan + config.layers * EXTRA < most
        results.append(kept)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            # fused multiply-adds and another order of additions, over some 50 operations of up to 112 terms
            assert (ours.grad - theirs.grad).norm() <= 2 * 50 * 11 * 2.0**-24 * theirs.grad.norm()
    assert results[0] == results[1]
