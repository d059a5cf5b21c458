"""Activation checkpointing in parallel layouts gives the same bits as without, and saves the bytes of the plan.

Recomputation repeats the kernels and the collectives of the forward pass with the same inputs, so that a layout with it
equals the same layout without it bit for bit; that the layout equals one process is tested without recomputation.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hlat.activation_checkpointing import plan_activations
from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.model import Decoder
from hlat.model.kernels.attention import builds_masks
from hlat.model.layers import Attention
from hlat.parallel import ParallelModel, build_parallel
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.stage_layers import rank_model_shards
from hlat.runtime.backend.device import has_fast_bf16
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients
from tests.support.distributed.jobs import batch_of, document_positions, documents, train
from tests.support.distributed.layouts import (
    CAPPED,
    CASES,
    MIXED,
    NORMS_AFTER,
    NORMS_BEFORE_AND_AFTER,
    SEQUENCE_LENGTH,
    SINKS,
    SOME,
    TWO_KV_HEADS,
    WINDOW,
    Case,
    recipe_content,
)
from tests.support.distributed.workers import Pool
from tests.support.storages import Allocated

POLICIES = ("selective", "full", "budget")
STEPS = 3
GIB = 1 << 30
SPLIT_BACKWARD = tuple(case for case in CASES if case.name in ("PP2 interleaved-zero-bubble", "PP2 x DP2, ZeRO 3"))


def plans(case: Case, content: dict[str, Any], rank: int) -> list[ActivationPlan]:
    """Return the activation plans of a rank's stages."""
    recipe = parse_recipe(content, world=case.world)
    step = StepShape.of(recipe, case.world)
    pipeline_rank = step.layout.coordinates(rank).pp
    shards = rank_model_shards(step, rank)
    return [plan_activations(recipe, shard, case.world, pipeline_rank, "cpu") for shard in shards]


def content_of(case: Case, policy: str, **changes: Any) -> dict[str, Any]:
    """Build the recipe of a case with a policy; a budget is half way between minimum and maximum."""
    memory: dict[str, Any] = {"activation_checkpointing": policy}
    if policy == "budget":
        ends = [_largest(case, content_of(case, other, **changes)) for other in ("none", "full")]
        memory["budget_gib"] = sum(ends) / 2 / GIB
    return recipe_content(case, memory=memory, **changes)


def _largest(case: Case, content: dict[str, Any]) -> int:
    everyone = (plan for rank in range(case.world) for plan in plans(case, content, rank))
    return max(plan.saved * plan.in_flight for plan in everyone)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=() if case.world <= 4 else pytest.mark.slow) for case in SOME]
    + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SPLIT_BACKWARD if case not in SOME],
)
def test_recomputation_gives_the_bits_of_the_same_layout_without(case: Case, pool: Pool) -> None:
    keeping = {**case.parallel, "gather_again": "never"}
    plain = pool.run(case.world, train, content_of(case, "none", parallel=keeping), STEPS)
    for policy in ("none", *POLICIES) if "tensor" in case.parallel else POLICIES:
        for ours, theirs in zip(pool.run(case.world, train, content_of(case, policy), STEPS), plain, strict=True):
            assert (ours.losses, ours.gradient_norms) == (theirs.losses, theirs.gradient_norms), policy
            for block, same in zip(ours.final, theirs.final, strict=True):
                assert block[:3] == same[:3] and (block[3] == same[3]).all(), (policy, block[0])


def kept(runtime: Runtime, content: dict[str, Any]) -> list[int]:
    """Count the bytes that a forward pass keeps alive, per stage of a rank; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    accumulate_gradients(model, batch_of(model, recipe, 1))  # creates rotation tables and FSDP2's state
    return [_kept(model, stage, recipe) for stage in model.stages]


def _kept(model: ParallelModel, stage: Decoder, recipe: Recipe) -> int:
    sequences = recipe.batch.micro_batch
    positions = SEQUENCE_LENGTH // model.layout.context
    ids = torch.zeros((sequences, positions), dtype=torch.int64)
    entering, where = ids, _local_positions(stage, recipe)
    if stage.embedding is None:
        shards = model.layout.tensor if model.layout.sequence_parallel else 1
        shape = (sequences, positions // shards, stage.config.hidden_size)
        entering = torch.zeros(shape, dtype=stage.compute, requires_grad=True)
    with Allocated() as allocated:
        leaving = stage(entering, ids, positions=where)
    parameters = [p.to_local() if hasattr(p, "to_local") else p for p in stage.parameters()]
    tables = [table for rope in stage.ropes.values() for table in rope.tables(((0, 1),), ids.device)]
    known = [leaving, entering, ids, *parameters, *tables, *([] if where is None else [where])]
    bytes_ = min(_later(lambda: allocated.alive(known)) for _ in range(20))  # until gloo's thread frees messages
    leaving.sum().backward()  # so that all ranks have run the same collectives
    return bytes_ + (entering.nbytes if model.layout.tensor == 1 or entering is not ids else 0)


def _local_positions(stage: Decoder, recipe: Recipe) -> torch.Tensor | None:
    """Positions of this rank's tokens within documents; None without isolation."""
    if not recipe.data.isolate:
        return None
    positions = document_positions(documents(1, recipe.batch.micro_batch, SEQUENCE_LENGTH))
    assert stage.spans is not None, "there are several processes"
    return torch.cat([positions[:, start:stop] for start, stop in stage.spans], dim=1)


def _later(value: Callable[[], int]) -> int:
    time.sleep(0.01)
    return value()


MEASURED = (
    Case("TP2 + SP", 2, {"tensor": 2}, micro_batch=4),
    Case("TP2", 2, {"tensor": 2, "sequence": False}, micro_batch=4),
    Case("TP4 + SP, 2 kv heads", 4, {"tensor": 4}, dict(TWO_KV_HEADS), micro_batch=2),
    Case("CP2", 2, {"context": 2, "zero": 0}, micro_batch=4),
    Case("PP2", 2, {"pipeline": 2}),
    Case("DP2, ZeRO 3", 2, {"zero": 3}),
    Case("TP4 + SP, norms after", 4, {"tensor": 4}, dict(NORMS_AFTER), micro_batch=2),
    Case("TP2, norms after", 2, {"tensor": 2, "sequence": False}, dict(NORMS_AFTER), micro_batch=4),
    Case("CP2, sliding window", 2, {"context": 2, "zero": 0}, dict(WINDOW), micro_batch=4),
    Case("CP2, layers differ", 2, {"context": 2, "zero": 0}, dict(MIXED), micro_batch=4),
    Case("CP2, capped", 2, {"context": 2, "zero": 0}, dict(CAPPED), micro_batch=4),
    Case("CP2, sinks", 2, {"context": 2, "zero": 0}, dict(SINKS), micro_batch=4),
    Case("TP2 + SP, norms before and after", 2, {"tensor": 2}, dict(NORMS_BEFORE_AND_AFTER), micro_batch=4),
)


@pytest.mark.parametrize("case", [case for case in MEASURED if case.name in ("TP2 + SP", "CP2", "PP2")], ids=str)
def test_with_attention_within_documents_a_rank_saves_the_bytes_of_its_plan(case: Case, pool: Pool) -> None:
    for policy in ("none", *POLICIES):
        content = content_of(case, policy, precision={"mode": "mixed"}, data={"isolate": True})
        wanted = [[plan.saved for plan in plans(case, content, rank)] for rank in range(case.world)]
        assert pool.run(case.world, kept, content) == wanted, policy


_IN_FP32 = ("TP2 + SP", "CP2", "PP2")  # in the default suite; all layouts in the slow suite


def _turns() -> list[object]:
    cases = [(case, mode) for mode in ("fp32", "mixed") for case in MEASURED]
    quick = [mode == "mixed" or case.name in _IN_FP32 for case, mode in cases]
    return [
        pytest.param(case, mode, id=f"{case}-{mode}", marks=() if fast else pytest.mark.slow)
        for (case, mode), fast in zip(cases, quick, strict=True)
    ]


@pytest.mark.parametrize(("case", "mode"), _turns())
def test_a_rank_saves_the_bytes_of_its_plan(case: Case, mode: str, pool: Pool) -> None:
    context = "context" in case.parallel
    if context and mode == "mixed" and not has_fast_bf16(torch.device("cpu")):
        pytest.skip("attention with a mask keeps wide copies where a CPU has no bf16 instructions")
    for policy in ("none", *POLICIES):
        content = content_of(case, policy, precision={"mode": mode})
        wanted = [[plan.saved for plan in plans(case, content, rank)] for rank in range(case.world)]
        # Scores with a cap or sinks always have one.
        altered = "attn_logit_softcapping" in case.model or case.model.get("architecture") == "gpt_oss"
        if context and not altered and builds_masks("cpu"):
            # The first rank's first chunk attends to itself, for which no mask is built; all ranks plan with one.
            (plan,) = plans(case, content, 0)
            windows = parse_recipe(content, world=case.world).model.windows(SEQUENCE_LENGTH)
            masks = sum(
                not (names & {"attention_log_sum", "attention_output"}) and window is None
                for names, window in zip(plan.recomputed, windows, strict=True)
            )
            wide = torch.float32 if mode == "fp32" else torch.bfloat16  # a mask is added to scores of this dtype
            wanted[0][0] -= masks * (SEQUENCE_LENGTH // 4) ** 2 * wide.itemsize
        assert pool.run(case.world, kept, content) == wanted, policy


def times_run(runtime: Runtime, content: dict[str, Any]) -> set[int]:
    """Count how often each block of a rank projects queries, keys and values per micro-batch; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    counts: Counter[int] = Counter()
    project = Attention.project

    def counting(self: Attention, *args: Any) -> Any:
        counts[id(self)] += 1
        return project(self, *args)

    with patch.object(Attention, "project", counting):
        accumulate_gradients(model, batch_of(model, recipe, 1))
    return {count // recipe.micro_batches(runtime.world) for count in counts.values()}


def test_a_split_backward_pass_recomputes_a_block_twice_and_not_for_each_parameter(pool: Pool) -> None:
    """Once for the input gradient and once for the weight gradients; the first stage computes both in one pass."""
    (case,) = (case for case in CASES if case.name == "PP2 interleaved-zero-bubble")
    first, second = pool.run(2, times_run, content_of(case, "full"))
    assert (first, second) == ({2, 3}, {3})
