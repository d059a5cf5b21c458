"""Compiled blocks recompute within their graph, following the same plan, applied before or after compilation."""

import shutil
from functools import cache, partial

import pytest
import torch
import torch.nn.attention.flex_attention

from hlat.activation_checkpointing import POLICIES, checkpoint_activations
from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.model import Decoder, DocumentMask
from hlat.model import document_attention as document_mask_module
from hlat.model.activations import RankWorkload, activation_bytes
from hlat.model.document_attention import block_mask
from tests.support.activation_checkpointing.small import LENGTH, config_of, document_positions, model_of, tokens

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

CHOICE = frozenset({"inner", "gate_up", "attention_input"})
EXTRA = 8192  # bytes per block: torch saves the state of the CPU's random generator despite preserve_rng_state=False


def compiled(order: str, backend: str = "inductor") -> Decoder:
    model = model_of(config_of("coalesced"), "fp32", [CHOICE if order == "plan first" else frozenset()] * 2)
    for block in model.blocks():
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)  # type: ignore[method-assign]
    if order == "plan last":
        checkpoint_activations(model, ActivationPlan("as listed", (CHOICE,) * 2, 0, 1, 0))
    return model


def saved(model: Decoder, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
    """Compute the loss, and the bytes saved for backward except for parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = tokens()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = model(ids, ids, positions=positions)
    tables = {
        t.untyped_storage().data_ptr() for rope in model.ropes.values() for t in rope.tables(((0, 1),), ids.device)
    }
    return loss, sum(storage.nbytes() for address, storage in kept.items() if address not in known | tables)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_block_follows_the_plan(backend: str) -> None:
    """The graphs decide what is kept; the first compiler generates no code for them, which takes most of the time."""
    config, results = config_of("coalesced"), []
    plain = model_of(config, "fp32", [frozenset()] * 2)
    saved(plain)[0].backward()
    for order in ("plan first", "plan last"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = compiled(order, backend)
        loss, kept = saved(model)
        loss.backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "two blocks, one graph"
        plan, most = (activation_bytes(config, *tokens().shape, "fp32", names).total for names in (CHOICE, ()))
        assert kept <= plan + config.layers * EXTRA < most
        results.append(kept)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            # fused multiply-adds and another order of summation, over about 50 operations of up to 112 terms
            assert (ours.grad - theirs.grad).norm() <= 2 * 50 * 11 * 2.0**-24 * theirs.grad.norm()
    assert results[0] == results[1]


def gradients(model: Decoder, positions: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(tokens(), tokens().roll(1), positions=positions).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def in_float64() -> Decoder:
    model = model_of(config_of("coalesced"), "fp32", [frozenset()] * 2).double()
    model.compute = torch.float64
    return model


def other_positions() -> torch.Tensor:
    """Positions of as many rows as in ``document_positions``, with other document boundaries."""
    return torch.stack([torch.cat([torch.arange(n) for n in (3, LENGTH - 3)]), torch.zeros(LENGTH, dtype=torch.int64)])


def test_attention_within_documents_follows_the_plan_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = config_of("coalesced")
    model, plain = compiled("plan last"), model_of(config, "fp32", [frozenset()] * 2)
    loss, kept = saved(model, document_positions())
    loss.backward()
    workload = RankWorkload(isolated=True)
    assert kept <= activation_bytes(config, *tokens().shape, "fp32", CHOICE, workload).total + config.layers * EXTRA
    for positions in (document_positions(), other_positions()):
        for ours, theirs in zip(gradients(model, positions), gradients(plain, positions), strict=True):
            # the same bound as above
            assert (ours - theirs).norm() <= 2 * 50 * 11 * 2.0**-24 * theirs.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "one graph for any document boundaries"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compile_blocks", [True, False], ids=["in a block's graph", "in its own graph"])
@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_for_accelerators_compute_the_same_gradients(
    policy: str, compile_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention uses torch's flex attention in float64, whose results differ by about 1e-14.

    On a CPU torch differentiates only its uncompiled form, and raises since that is slow (the check is patched). The
    compiler backend generates no code.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = in_float64()
    wanted = [gradients(plain, positions) for positions in (document_positions(), other_positions())]
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(DocumentMask, "of_windows", _for_accelerators)
    compiler = "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr(
        document_mask_module, "_compiled", cache(document_mask_module._compiled.__wrapped__)
    )  # a new cache
    model = in_float64()
    for block in model.blocks() if compile_blocks else ():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    checkpoint_activations(model, ActivationPlan("as listed", (POLICIES[policy],) * 2, 0, 1, 0), compiler)
    for positions, right in zip((document_positions(), other_positions()), wanted, strict=True):
        for ours, theirs in zip(gradients(model, positions), right, strict=True):
            assert (ours - theirs).norm() <= 1e-9 * theirs.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "one graph for any document boundaries"


def _for_accelerators(
    positions: torch.Tensor, spans: tuple[tuple[int, int], ...], windows: set[int | None]
) -> dict[int | None, DocumentMask]:
    assert windows == {None}
    offsets = torch.arange(LENGTH)
    return {None: DocumentMask(offsets - positions, spans, block_mask(offsets - positions, offsets, LENGTH), None)}
