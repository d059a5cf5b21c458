"""Rehearsed operations in time: complete, in order, without overlaps on a track, and as long as the plan says."""

import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from hlat.hardware import load_catalog, parse_cluster
from hlat.parallel.stages.in_flight import pass_order
from hlat.rehearsal import PARTS, Rehearsal, parse_device, rehearse
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

# Layers as wide as those of a 7B model: where kernels are small, gaps and latencies decide, not rates.
WIDE: dict[str, Any] = {
    "model": {
        **SMALL["model"],
        **{"vocab_size": 2048, "hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "kv_heads": 32},
        "max_sequence_length": 2048,
    },
    "data": {**SMALL["data"], "sequence_length": 2048},
    "precision": {"mode": "mixed"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"parallel": {"zero": 3}, "batch": {"global_batch": 64, "micro_batch": 4}},
    "TP 2, PP 2, selective": {
        "parallel": {"tensor": 2, "pipeline": 2, "zero": 1},
        "memory": {"activation_checkpointing": "selective"},
        "batch": {"global_batch": 8, "micro_batch": 1},
    },
    "TP 4, full": {
        "parallel": {"tensor": 4, "zero": 1},
        "memory": {"activation_checkpointing": "full"},
        "batch": {"global_batch": 8, "micro_batch": 2},
    },
    "CP 2, DP 4": {"parallel": {"context": 2, "zero": 0}, "batch": {"global_batch": 16, "micro_batch": 2}},
    "zbv": {
        "parallel": {"pipeline": 2, "schedule": "zbv", "zero": 1},
        "batch": {"global_batch": 16, "micro_batch": 1},
    },
}
FAST = ("ZeRO 3", "TP 2, PP 2, selective")


@cache
def rehearsed(name: str) -> Rehearsal:
    """The representative ranks of a layout on a machine of eight H100."""
    cluster = parse_cluster("p5.48xlarge:1", load_catalog())
    recipe = recipe_of(8, **{**WIDE, **LAYOUTS[name]})
    return rehearse(recipe, 8, device=parse_device(None, cluster, load_catalog()), cluster=cluster)


def layouts(*fast: str) -> Any:
    """All layouts; those that are not named are slow."""
    names = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in LAYOUTS]
    return pytest.mark.parametrize("name", names)


@layouts(*FAST)
def test_every_operation_has_its_place_and_parts_add_up(name: str) -> None:
    found = rehearsed(name)
    for report, timeline in zip(found.ranks, found.timelines, strict=True):
        assert len(timeline.events) == len(report.trace)
        assert {id(placed.event) for placed in timeline.events} == set(map(id, report.trace))
        assert timeline.parts.keys() == PARTS.keys() and min(timeline.parts.values()) >= 0
        last = max(placed.stop for placed in timeline.events if placed.stream == "compute")
        assert timeline.seconds == pytest.approx(last + timeline.parts["stragglers"])


@layouts(*FAST)
def test_a_step_takes_what_the_plan_says(name: str) -> None:
    """Within 10 % for the slowest rank, the bound that docs/planning.md states.

    The steps are short: four layers, few micro-batches. What formulas leave out weighs most there: the first gather and
    the last reduction of weights, which nothing hides, and the messages of embedding and loss.
    """
    found = rehearsed(name)
    assert found.plan is not None
    slowest = max(timeline.seconds for timeline in found.timelines)
    assert slowest == pytest.approx(found.plan.prediction.step_seconds, rel=0.10)
    parts = found.plan.parts
    assert sum(parts.values()) == pytest.approx(found.plan.prediction.step_seconds)


@layouts("TP 2, PP 2, selective")
def test_passes_run_in_the_order_of_the_schedule(name: str) -> None:
    found = rehearsed(name)
    assert found.plan is not None
    layout = found.plan.prediction.candidate
    count = layout.accumulation(found.plan.request.global_batch)
    for report, timeline in zip(found.ranks, found.timelines, strict=True):
        passes = [of_pass for of_pass, _, _ in timeline.passes]
        order = pass_order(layout.schedule, report.coordinates.pp, layout.pipeline, count, layout.virtual)
        # torch runs the first stage's backward pass, whose input needs no gradient, as one pass.
        assert passes == [each for each in order if each[:2] != ("input", 0)]
        starts = [start for _, start, _ in timeline.passes]
        assert starts == sorted(starts)


def test_weights_arrive_while_the_block_before_computes() -> None:
    """ZeRO 3: most of the time of gathers is hidden behind products."""
    (timeline,) = rehearsed("ZeRO 3").timelines
    gathers = [placed for placed in timeline.events if placed.event.module and placed.event.kind == "all_gather"]
    busy = [(placed.start, placed.stop) for placed in timeline.events if placed.stream == "compute"]
    hidden = sum(
        max(0.0, min(gather.stop, stop) - max(gather.start, start)) for gather in gathers for start, stop in busy
    )
    assert hidden > 0.5 * sum(gather.stop - gather.start for gather in gathers)
    for gather in gathers:
        computed = (
            placed.start
            for placed in timeline.events[timeline.events.index(gather) :]
            if placed.stream == "compute" and placed.event.module == gather.event.module
        )
        assert next(computed, gather.stop) >= gather.stop, "a block begins when its weights are there"


def test_messages_take_what_their_links_need() -> None:
    """Gathers between two chips: each sends half of the tensor; latency and memory take at most twice as long again."""
    found = rehearsed("TP 2, PP 2, selective")
    assert found.plan is not None
    link = found.plan.request.cluster.link_rate
    for timeline in found.timelines:
        gathers = [placed for placed in timeline.events if placed.event.kind == "all_gather"]
        gathers = [placed for placed in gathers if placed.stream == "tensor"]
        assert gathers
        for placed in gathers:
            transfer = placed.event.size / 2 / link
            assert transfer < placed.stop - placed.start < 3 * transfer


def test_the_norm_of_all_stages_waits_for_the_last_one() -> None:
    """Each rank of a pipeline ends when the plan's simulation of all of them does, if it is not later itself."""
    found = rehearsed("TP 2, PP 2, selective")
    assert found.plan is not None and found.plan.pipeline is not None
    for timeline in found.timelines:
        (norm,) = (placed for placed in timeline.events if placed.event.axis.startswith("pipeline+"))
        assert norm.start >= found.plan.pipeline.seconds
    ends = [max(stop for _, _, stop in timeline.passes) for timeline in found.timelines]
    assert min(ends) < found.plan.pipeline.seconds, "one of them has to wait"


@layouts(*FAST)
def test_the_file_follows_the_trace_event_format(name: str) -> None:
    """Complete events ("X") with name, ts, dur in microseconds, pid and tid, and metadata ("M").

    The format: "Trace Event Format", sections "JSON Object Format", "Complete Events", "Metadata Events". Viewers draw
    events of one thread wrongly that overlap and are not nested; here those of a thread follow each other.
    """
    found = rehearsed(name)
    content = json.loads(json.dumps(found.chrome_trace(), allow_nan=False))
    assert content["displayTimeUnit"] == "ms"
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
            tracks[event["pid"], event["tid"]].append(event)
    assert tracks.keys() == names.keys() and {pid for pid, _ in tracks} == {report.rank for report in found.ranks}
    for events in tracks.values():
        placed = sorted(events, key=lambda event: (event["ts"], event["ts"] + event["dur"]))
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(placed)), names
    for report in found.ranks:
        drawn = [event for (pid, _), events in tracks.items() if pid == report.rank for event in events]
        assert sum(event["args"].get("FLOPs", 0) for event in drawn) == report.flops
        sent = sum(event["args"]["bytes"] for event in drawn if "axis" in event["args"])
        assert sent == sum(message.bytes * count for message, count in report.messages.items())
        assert {names[report.rank, 0], names[report.rank, 1]} == {"passes", "compute"}
