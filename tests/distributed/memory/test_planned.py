"""Law 8: plan, rehearsal and real processes agree about memory, communication and FLOPs of a layout."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from hlat.config import Recipe, load_recipe
from hlat.config.load import parse_recipe
from hlat.hardware import MeasuredMachine, load_catalog, parse_cluster
from hlat.model.counts import count_parameters
from hlat.planner.cost.step_counts import exchanged_bytes, executed_flops
from hlat.planner.memory import rank_memory
from hlat.planner.problem.layouts import Candidate, parse_layout
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import PlanRequest, resolve_request
from hlat.precision import MODES
from hlat.rehearsal import RankReport, rehearse
from tests.support.bf16 import bf16_instructions, widens
from tests.support.distributed.rehearsed import measure
from tests.support.distributed.workers import Pool

SEQUENCE = 512
MODEL = {
    "vocab_size": 2048,
    "layers": 4,
    "hidden_size": 256,
    "intermediate_size": 704,
    "heads": 8,
    "kv_heads": 4,
    "max_sequence_length": SEQUENCE,
}
LAYOUTS = (
    (1, "zero=0,mbs=2", "fp32"),
    (1, "zero=0,mbs=4,ckpt=selective", "bf16-sr"),
    (2, "zero=0,mbs=2,ckpt=full", "mixed"),
    (4, "zero=1,mbs=2", "mixed"),
    (4, "zero=2,mbs=2", "fp32"),
    (4, "zero=3,mbs=2,ckpt=selective", "mixed"),
    (2, "tp=2,zero=0,mbs=4", "bf16-kahan"),
    (8, "tp=4,zero=1,mbs=2,ckpt=full", "fp32"),
    (2, "pp=2,zero=0,mbs=2", "mixed"),
    (4, "pp=2,vpp=2,zero=1,mbs=2,ckpt=selective", "fp32"),
    (2, "pp=2,schedule=interleaved-zero-bubble,zero=0,mbs=2", "fp32"),
    (4, "pp=2,schedule=zbv,zero=1,mbs=2", "mixed"),
    (4, "pp=2,zero=3,mbs=2", "mixed"),
    (4, "tp=2,pp=2,zero=0,mbs=2", "mixed"),
    (2, "tp=2,zero=0,mbs=4,gather=never", "bf16-kahan"),
    (4, "cp=2,zero=1,mbs=2,ckpt=selective", "fp32"),
    (8, "tp=2,pp=2,zero=1,mbs=2,ckpt=selective", "mixed"),
    (4, "zero=3,rep=2,mbs=2,ckpt=selective", "mixed"),
)
_QUICK = (1, 6)
MUON_LAYOUTS = (
    (1, "zero=0,mbs=1", "mixed"),
    (1, "zero=0,mbs=1,ckpt=full", "bf16-sr"),
    (2, "zero=0,mbs=1", "fp32"),
    (4, "tp=2,zero=1,mbs=1,ckpt=full", "mixed"),
    (4, "zero=3,mbs=1,ckpt=full", "fp32"),
    (4, "tp=4,zero=0,mbs=1", "bf16-kahan"),
    (8, "tp=2,pp=2,zero=1,mbs=1", "mixed"),
    (4, "cp=2,zero=0,mbs=1", "fp32"),
)
TURNS = [
    *(
        pytest.param(*case, {}, marks=() if index in _QUICK else pytest.mark.slow, id=f"{case[0]} processes, {case[1]}")
        for index, case in enumerate(LAYOUTS)
    ),
    *(
        pytest.param(
            *case,
            {"optimizer": {"kind": "muon"}},
            marks=() if index == 3 else pytest.mark.slow,
            id=f"Muon, {case[0]} processes, {case[1]}",
        )
        for index, case in enumerate(MUON_LAYOUTS)
    ),
    *(
        pytest.param(
            *case, {"model": {"architecture": name, **options}}, marks=pytest.mark.slow, id=f"{name}, {case[1]}"
        )
        for name, options, case in (
            ("olmo2", {}, (2, "tp=2,zero=0,mbs=4", "bf16-kahan")),
            ("olmo2", {}, (2, "zero=1,mbs=2,ckpt=full", "mixed")),
            ("mistral", {"sliding_window": 128}, (2, "zero=1,mbs=2,ckpt=selective", "fp32")),
            ("mistral", {"sliding_window": 128}, (4, "cp=2,zero=1,mbs=2", "fp32")),
        )
    ),
    *(
        pytest.param(
            *case,
            {"model": {"tie_embeddings": tied}, "micro_batches": count},
            marks=pytest.mark.slow,
            id=f"{case[1]}, {count} micro-batches, {'tied' if tied else 'untied'}",
        )
        for case in (
            (2, "zero=0,mbs=2", "mixed"),
            (2, "zero=1,mbs=2,ckpt=full", "fp32"),
            (4, "zero=3,mbs=2,ckpt=selective", "mixed"),
            (4, "tp=2,zero=1,mbs=2", "bf16-sr"),
            (4, "zero=2,mbs=1,ckpt=full", "mixed"),
        )
        for count, tied in ((1, False), (1, True), (2, True))
    ),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A custom machine, of which only memory matters here."""
    rates = {"bfloat16": 1e11, "float32": 1e11}
    machine = MeasuredMachine("here", 1, rates, 24 << 30, 1e10, 1e9)
    file = tmp_path_factory.mktemp("machine") / "own.yaml"
    file.write_text(yaml.safe_dump(machine.catalog("here")), encoding="utf-8")
    return str(file)


@pytest.fixture(name="bf16_instructions")
def _bf16_instructions() -> Iterator[None]:
    with bf16_instructions():
        yield


def asked(
    machine: str, world: int, layout: str, mode: str, changes: dict[str, Any]
) -> tuple[dict[str, Any], Recipe, PlanRequest, Candidate]:
    """Convert a layout to a recipe, and to a planner's question and candidate."""
    cluster = parse_cluster(f"here:{world}", load_catalog(machine))
    recipe = parse_recipe(_content({}, 8, 1, mode, "none", changes))
    model, optimizer = recipe.model, recipe.optimizer
    question = PlanRequest("small", model, cluster, 1_000_000, SEQUENCE, 8 * world, mode)
    candidate = parse_layout(layout, question)
    micro_batches = changes.get("micro_batches", 4 if candidate.pipeline > 1 else 2)
    batch = micro_batches * candidate.data * candidate.micro_batch
    question = PlanRequest("small", model, cluster, 1_000_000, SEQUENCE, batch, mode, optimizer=optimizer)
    parallel = candidate.parallel.model_dump(exclude_none=True)
    content = _content(parallel, batch, candidate.micro_batch, mode, candidate.recompute, changes)
    return content, parse_recipe(content, world=world), question, candidate


def _content(
    parallel: dict[str, Any], batch: int, micro_batch: int, mode: str, policy: str, changes: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model": MODEL | changes.get("model", {}),
        "optimizer": changes.get("optimizer", {}),
        "data": {"path": "none", "sequence_length": SEQUENCE, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": batch, "micro_batch": micro_batch},
        "training": {"steps": 10, "seed": 3},
        "parallel": parallel,
        "precision": {"mode": mode},
        "memory": {"activation_checkpointing": policy},
    }


@pytest.mark.parametrize(("world", "layout", "mode", "changes"), TURNS)
def test_plans_agree_with_rehearsals_and_processes(
    machine: str, world: int, layout: str, mode: str, changes: dict[str, Any], pool: Pool
) -> None:
    """Memory within 3 % of the rehearsal and 8 % of the processes; bytes sent and FLOPs exactly.

    Plans are for devices that multiply bf16 numbers. A CPU that widens them is rehearsed as it is too: the processes
    take what its rehearsal takes more than the planned one, and compute what it computes.
    """
    content, recipe, question, candidate = asked(machine, world, layout, mode, changes)
    measured = pool.run(world, measure, content)
    first = [stage * (world // candidate.pipeline) for stage in range(candidate.pipeline)]
    with bf16_instructions():
        reports = rehearse(recipe, world, first).ranks
    here = rehearse(recipe, world, first).ranks if widens(mode) else reports
    for stage, (report, own) in enumerate(zip(reports, here, strict=True)):
        compare_with_rehearsal(question, candidate, stage, report)
        planned = rank_memory(question, candidate, stage).total + own.peak_bytes - report.peak_bytes
        assert abs(planned / measured[own.rank].peak - 1) < 0.08, (stage, planned, measured[own.rank].peak)
        assert own.flops == measured[own.rank].flops, stage


DEEP = (
    "pp=4,schedule=gpipe,zero=0,mbs=2",
    "pp=4,zero=0,mbs=2",
    "pp=4,vpp=2,zero=0,mbs=2",
    "pp=4,schedule=interleaved-zero-bubble,zero=0,mbs=2",
    "pp=4,schedule=zbv,zero=0,mbs=2",
    "pp=4,vpp=2,zero=0,mbs=2,ckpt=full",
)


@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if index == 2 else pytest.mark.slow) for index, each in enumerate(DEEP)]
)
def test_plans_of_deep_pipelines_agree_with_rehearsals(machine: str, layout: str) -> None:
    """Four ranks, and more micro-batches than messages may be on their way at a time."""
    changes = {"micro_batches": 12, "model": {"layers": 8, "vocab_size": 512}}
    _, recipe, question, candidate = asked(machine, 4, layout, "mixed", changes)
    for stage, report in enumerate(rehearse(recipe, 4, range(4)).ranks):
        compare_with_rehearsal(question, candidate, stage, report)


REPEATED = (
    # Embedding and head have most elements: they are reduced between micro-batches
    (2, "zero=2,mbs=1,ckpt=full", 2, False),
    (2, "zero=2,mbs=1,ckpt=full", 3, False),
    (1, "zero=0,mbs=1,ckpt=full", 2, True),
    (2, "zero=1,mbs=1,ckpt=full", 2, True),
    (2, "pp=2,schedule=gpipe,zero=0,mbs=1", 12, False),
)


@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize(("world", "layout", "count", "tied"), REPEATED)
def test_plans_of_several_micro_batches_agree_with_rehearsals(
    machine: str, world: int, layout: str, count: int, tied: bool
) -> None:
    changes = {"micro_batches": count, "model": {"layers": 2, "vocab_size": 8192, "tie_embeddings": tied}}
    _, recipe, question, candidate = asked(machine, world, layout, "mixed", changes)
    for stage, report in enumerate(rehearse(recipe, world, range(candidate.pipeline)).ranks):
        compare_with_rehearsal(question, candidate, stage, report)


SPLIT = (
    *((2, f"pp=2,schedule=zbv,zero=0,mbs=2,ckpt={policy}", "mixed", {}) for policy in ("none", "selective", "full")),
    (2, "pp=2,schedule=interleaved-zero-bubble,zero=0,mbs=2,ckpt=full", "fp32", {"coalesce": False}),
    (4, "tp=2,pp=2,schedule=zbv,zero=0,mbs=2,ckpt=full", "bf16-sr", {}),
    *(
        (4, f"pp=4,schedule={schedule},zero=0,mbs=2,ckpt={policy}", "mixed", {})
        for schedule in ("zbv", "interleaved-zero-bubble")
        for policy in ("none", "selective", "full")
    ),
)


@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize(
    ("world", "layout", "mode", "model"),
    [pytest.param(*each, marks=() if index < 5 else pytest.mark.slow) for index, each in enumerate(SPLIT)],
)
def test_plans_of_split_backward_passes_agree_with_rehearsals(
    machine: str, world: int, layout: str, mode: str, model: dict[str, Any]
) -> None:
    """Zero-bubble schedules: what both halves keep and recompute is most of the memory of these small models."""
    changes = {"micro_batches": 6 if world == 2 else 8, "model": {"layers": 8, "vocab_size": 512} | model}
    _, recipe, question, candidate = asked(machine, world, layout, mode, changes)
    ranks = [stage * (world // candidate.pipeline) for stage in range(candidate.pipeline)]
    for stage, report in enumerate(rehearse(recipe, world, ranks).ranks):
        compare_with_rehearsal(question, candidate, stage, report)


@pytest.mark.parametrize(
    ("world", "layout", "mode"),
    [(1, "zero=0,mbs=2", "bf16-sr"), pytest.param(4, "zero=2,mbs=2", "mixed", marks=pytest.mark.slow)],
)
def test_an_average_of_the_weights_is_planned(machine: str, world: int, layout: str, mode: str, pool: Pool) -> None:
    """Plan, rehearsal and process agree on what ``training.ema`` adds: 4 bytes per element that a rank stores."""
    content, _, question, candidate = asked(machine, world, layout, mode, {})
    without = rank_memory(question, candidate, 0).total
    content["training"] |= {"ema": {}}
    recipe = parse_recipe(content, world=world)
    question = replace(question, recipe=recipe)
    with bf16_instructions():
        (report,) = rehearse(recipe, world, [0]).ranks
    own = rehearse(recipe, world, [0]).ranks[0] if widens(mode) else report
    compare_with_rehearsal(question, candidate, 0, report)
    measured = pool.run(world, measure, content)[0]
    planned = rank_memory(question, candidate, 0).total + own.peak_bytes - report.peak_bytes
    assert abs(planned / measured.peak - 1) < 0.03
    shards = candidate.data if candidate.zero else 1
    elements = count_parameters(recipe.model).total / shards
    assert report.between_steps["components"] == rank_memory(question, candidate, 0).total - without == 4 * elements


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster", "layout"),
    [
        ("hlat-7b", "trn1.32xlarge:64", "tp=8,zero=0,mbs=1,ckpt=selective"),
        ("hlat-70b", "trn1.32xlarge:256", "tp=32,pp=8,zero=1,mbs=1,ckpt=selective"),
    ],
)
def test_plans_of_hlats_runs_agree_with_rehearsals(name: str, cluster: str, layout: str) -> None:
    """Runs of 2,048 and 8,192 processes: first, middle and last stage are compared."""
    question = resolve_request(PlanQuestion(name), parse_cluster(cluster, load_catalog()))
    candidate = parse_layout(layout, question)
    stages = sorted({0, candidate.pipeline // 2, candidate.pipeline - 1})
    ranks = [stage * (candidate.world // candidate.pipeline) for stage in stages]
    for stage, report in zip(stages, rehearse(load_recipe(name), candidate.world, ranks).ranks, strict=True):
        compare_with_rehearsal(question, candidate, stage, report)


def compare_with_rehearsal(question: PlanRequest, candidate: Candidate, stage: int, report: RankReport) -> None:
    """Compare the plan of a rank with its rehearsal, which has no device runtime and no allocator."""
    memory = rank_memory(question, candidate, stage)
    planned = memory.total - memory.runtime - memory.slack
    assert abs(planned / report.peak_bytes - 1) < 0.03, (stage, planned, report.peak_bytes)
    assert executed_flops(question, candidate, stage) == report.flops, stage
    sent: Counter[str] = Counter()
    for message, count in report.messages.items():
        if message.kind != "receive":
            sent[message.axis.partition("+")[0]] += count * message.bytes
    unplanned = unplanned_bytes(question, candidate, stage)
    for axis, size in exchanged_bytes(question, candidate, stage).items():
        assert sent[axis] - size == unplanned[axis], (stage, axis)


def unplanned_bytes(question: PlanRequest, candidate: Candidate, stage: int) -> Counter[str]:
    """Bytes of messages that a plan does not count, by the first axis of the message."""
    found: Counter[str] = Counter()
    # Token count, one int32, summed over the data axis; loss and norm, two fp32 numbers, over all axes.
    found["data"] += 4 * (candidate.data > 1)
    first = [axis for axis in ("pipeline", "data", "tensor") if getattr(candidate, axis) > 1][:1]
    found.update(dict.fromkeys(first, 8))
    if candidate.tensor > 1:
        last = stage == (0 if candidate.schedule == "zbv" else candidate.pipeline - 1)
        # Maximum and two sums for each token of the head, in fp32.
        found["tensor"] += (
            12 * candidate.accumulation(question.global_batch) * candidate.micro_batch * question.sequence * last
        )
        if question.model.architecture == "olmo2":
            # Statistics of the norms of all queries and of all keys, forward and backward, in fp32.
            tokens = candidate.accumulation(question.global_batch) * candidate.micro_batch * question.sequence
            found["tensor"] += 16 * tokens * question.model.layers // candidate.pipeline
        # Once per step the gradients of norms, of which each rank has the term of its shard of the sequence.
        norms = 2 * question.model.layers / candidate.pipeline + last
        shards = candidate.data * candidate.context if candidate.zero > 0 else 1
        found["tensor"] += norms * question.model.hidden_size * MODES[question.mode].reduction.itemsize / shards
    return found
