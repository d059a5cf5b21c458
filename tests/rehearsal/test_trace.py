"""Order of messages and products in a step: FSDP2 requests parameters before they are needed, and reduces behind.

A device runs what is issued in the order of issue, messages beside products. So a block's parameters arrive while the
block in front of it computes only if their gathering was issued before that computation.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hlat.parallel import data_parallel as fsdp
from hlat.parallel.stages.in_flight import pass_order
from hlat.rehearsal import ENDS, PRODUCT, TraceEvent, rehearse
from tests.support.rehearsal.small_recipes import recipe_of

GATHER, REDUCE = "all_gather", "reduce_scatter"
HEAD = "norm, head"


def trace_of(**sections: Any) -> tuple[TraceEvent, ...]:
    """Events of rank 0 of two, which share the state of four blocks (ZeRO 3), in a step of one micro-batch."""
    recipe = recipe_of(2, parallel={"zero": 3}, batch={"global_batch": 2, "micro_batch": 1}, **sections)
    return rehearse(recipe, 2, [0]).ranks[0].trace


@cache
def plain_trace() -> tuple[TraceEvent, ...]:
    """Events of a model whose head is not tied."""
    return trace_of()


def blocks_of(trace: Sequence[TraceEvent]) -> list[str]:
    """Names of the blocks in the order of the forward pass."""
    computed = [event.module for event in trace if event.phase == "forward" and event.kind == PRODUCT]
    return [name for name in dict.fromkeys(computed) if name.startswith("layers.")]


def place(trace: Sequence[TraceEvent], phase: str, kind: str, module: str) -> int:
    """Place of the first event of a module in the order of issue."""
    return next(
        at for at, event in enumerate(trace) if (event.phase, event.kind, event.module) == (phase, kind, module)
    )


def late_gathers(trace: Sequence[TraceEvent], phase: str) -> list[str]:
    """Blocks whose parameters are requested only after the block in front of them has begun to compute."""
    order = blocks_of(trace) if phase == "forward" else blocks_of(trace)[::-1]
    return [
        following
        for block, following in pairwise(order)
        if place(trace, phase, GATHER, following) > place(trace, phase, PRODUCT, block)
    ]


def test_parameters_are_requested_one_block_ahead_in_both_directions() -> None:
    trace = plain_trace()
    assert len(blocks_of(trace)) == 4
    assert late_gathers(trace, "forward") == late_gathers(trace, "backward") == []


@pytest.mark.parametrize("tied", [False, True])
def test_an_untied_head_is_requested_during_the_last_block_and_reduced_at_once(
    tied: bool,
) -> None:
    """Embedding and head of an untied model are modules of their own, each gathered once; a tied model has one."""
    trace = trace_of(model={"tie_embeddings": True}) if tied else plain_trace()
    blocks = blocks_of(trace)
    units = [event.module for event in trace if event.phase == "forward" and event.kind == GATHER and event.module]
    assert units == ([ENDS, *blocks] if tied else ["embedding", *blocks, HEAD])
    again = [event.module for event in trace if event.phase == "backward" and event.kind == GATHER]
    assert again == blocks[::-1]
    reduced = [event.module for event in trace if event.kind == REDUCE and event.module]
    assert reduced == ([*blocks[::-1], ENDS] if tied else [HEAD, *blocks[::-1], "embedding"])
    if not tied:
        assert place(trace, "forward", GATHER, HEAD) < place(trace, "forward", PRODUCT, blocks[-1])
        assert place(trace, "backward", REDUCE, HEAD) < place(trace, "backward", PRODUCT, blocks[-1])


def test_gradients_are_reduced_behind_the_request_of_the_next_parameters() -> None:
    trace = plain_trace()
    backward = blocks_of(trace)[::-1]
    for block, following in pairwise(backward):
        reduced = place(trace, "backward", REDUCE, block)
        assert place(trace, "backward", PRODUCT, block) < reduced
        assert place(trace, "backward", GATHER, following) < reduced


def test_prefetching_switched_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "_prefetch_in_order", lambda modules: None)
    trace = trace_of()
    assert late_gathers(trace, "forward") == blocks_of(trace)[1:]
    assert late_gathers(trace, "backward") == []
    monkeypatch.setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(lambda group, pass_type: None))
    trace = trace_of()
    assert late_gathers(trace, "backward") == blocks_of(trace)[-2::-1]


def test_a_trace_has_the_shapes_of_products_and_every_event_once() -> None:
    recipe = recipe_of(2, parallel={"zero": 1}, batch={"global_batch": 4, "micro_batch": 1})
    rehearsed = rehearse(recipe, 2, [1])
    (report,) = rehearsed.ranks
    assert all(2 * prod(event.shape) == event.flops for event in report.trace if event.kind == PRODUCT)
    events = rehearsed.chrome_trace()["traceEvents"]
    assert [event["ts"] for event in events] == list(range(len(report.trace)))
    assert {(event["ph"], event["pid"], event["tid"]) for event in events} == {
        ("X", 1, "compute"),
        ("X", 1, "messages"),
    }


def test_recomputed_products_are_marked() -> None:
    """Full recomputation runs all products of a block again but the last, which nothing needs."""
    recipe = recipe_of(1, memory={"activation_checkpointing": "full"}, batch={"global_batch": 1, "micro_batch": 1})
    (report,) = rehearse(recipe, 1).ranks
    blocks = recipe.model.layers
    forward = [event.flops for event in report.trace if event.kind == PRODUCT and event.phase == "forward"]
    again = [event.flops for event in report.trace if event.kind == PRODUCT and event.recomputed]
    assert len(again) == 3 * blocks and set(again) <= set(forward)
    assert not any(event.recomputed for event in report.trace if event.phase != "backward")


def test_passes_are_labelled_in_the_order_of_the_schedule() -> None:
    recipe = recipe_of(4, parallel={"pipeline": 4, "zero": 1}, batch={"global_batch": 4, "micro_batch": 1})
    for report in rehearse(recipe, 4, [1, 3]).ranks:
        labels = [event.of_pass for event in report.trace if event.of_pass is not None]
        order = pass_order("1f1b", report.rank, 4, 4, 1)
        assert list(dict.fromkeys(labels)) == order


def test_coalesced_layers_send_the_same_messages_and_need_fewer_products() -> None:
    """Three products of a pass for each matrix (forward, by the input, by the weight): of 4 matrices instead of 7."""
    sides = []
    for coalesce in (True, False):
        sections = {"model": {"layers": 2, "coalesce": coalesce}, "batch": {"global_batch": 4, "micro_batch": 1}}
        sides.append(rehearse(recipe_of(2, parallel={"tensor": 2}, **sections), 2, [0]).ranks[0])
    one, other = sides
    assert one.messages == other.messages and one.flops == other.flops
    products, separate = (sum(event.kind == PRODUCT for event in each.trace) for each in sides)
    assert separate - products == 4 * 2 * 3 * (7 - 4)
