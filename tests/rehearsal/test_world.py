"""Rehearsals: selection of ranks, counts, and refusals."""

from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from hlat.config import RecipeError
from hlat.hardware import load_catalog, parse_cluster
from hlat.model.counts import count_parameters, flops_per_token
from hlat.parallel.layout import Layout
from hlat.planner.memory import ranks_of_interest
from hlat.rehearsal import CATEGORIES, RankReport, default_ranks, rehearsal_json, rehearse, rehearse_rank, world
from hlat.rehearsal.plan import plan_step
from hlat.runtime.distributed.join import Runtime, fake_rank, host_values, in_fake_world
from hlat.runtime.errors import LaunchError
from hlat.runtime.helper_process import PeerEnded
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

PIPELINE = {"parallel": {"pipeline": 4, "tensor": 2, "zero": 1}, "batch": {"global_batch": 32, "micro_batch": 2}}


@cache
def alone(**precision: str) -> RankReport:
    """Report of a run of one process."""
    (report,) = rehearse(recipe_of(1, **({"precision": precision} if precision else {})), 1).ranks
    return report


def test_default_ranks_are_the_first_two_and_the_last_of_a_pipeline() -> None:
    recipe = recipe_of(32, **PIPELINE)
    layout = Layout.of(recipe.parallel, 32)
    assert [layout.coordinates(rank).pp for rank in default_ranks(recipe, 32)] == [0, 1, 3]
    assert default_ranks(recipe_of(), 1) == [0]


def test_plan_and_rehearsal_speak_of_the_same_ranks() -> None:
    """Nine layers on four ranks: the fullest is neither the first, second nor last."""
    model = {**SMALL["model"], "layers": 9}
    # In fp32, grouped heads on a GPU keep all scores, which the rule without a plan does not know.
    recipe = recipe_of(8, parallel={"pipeline": 4, "zero": 1}, model=model, precision={"mode": "mixed"})
    plan = plan_step(recipe, parse_cluster("p5.48xlarge:1", load_catalog()), 8)
    reported = ranks_of_interest(plan.request, plan.prediction.candidate)
    assert list(plan.prediction.memory) == reported
    layout = Layout.of(recipe.parallel, 8)
    assert [layout.coordinates(rank).pp for rank in default_ranks(recipe, 8, plan)] == reported
    assert [layout.coordinates(rank).pp for rank in default_ranks(recipe, 8)] == reported


def test_a_rank_has_the_layers_of_its_stage_and_sends_to_its_neighbours() -> None:
    found = rehearse(recipe_of(32, **PIPELINE), 32)
    assert [report.layers for report in found.ranks] == [((0, 1),), ((1, 2),), ((3, 4),)]
    sends = [sum(n for message, n in report.messages.items() if message.kind == "send") for report in found.ranks]
    assert sends == [4, 8, 4], "to one neighbour, to two, to one, for each of 4 micro-batches"
    assert all(m.axis == "pipeline" for report in found.ranks for m in report.messages if m.kind == "send")


def test_the_flops_of_one_process_are_those_of_the_model() -> None:
    recipe, report = recipe_of(1), alone()
    tokens = recipe.batch.global_batch * recipe.data.sequence_length
    model, length = recipe.model, recipe.data.sequence_length
    # Attention recomputes its scores in backward: five products of s x s, where the model counts four.
    recomputed = 2 * tokens * model.layers * model.heads * model.n_head_dim * length
    assert report.flops == flops_per_token(model, length, "full") * tokens + recomputed


@pytest.mark.parametrize(
    ("mode", "each"),
    [("bf16-kahan", 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fp32", 12), ("bf16-sr", 6)))],
)
def test_checkpoint_bytes_of_all_ranks_add_up_to_the_model(mode: str, each: int) -> None:
    """Weights and optimizer state of every parameter, once however replicated, and the additions of rank 0."""
    recipe = recipe_of(4, parallel={"tensor": 2, "zero": 1}, precision={"mode": mode}, batch={"micro_batch": 4})
    reports = rehearse(recipe, 4, range(4)).ranks
    whole = alone(mode=mode).checkpoint_bytes
    assert sum(report.checkpoint_bytes for report in reports) == whole
    assert 0 < whole - each * count_parameters(recipe.model).total < 20_000, (
        "random number generators and a step counter"
    )


@pytest.mark.parametrize(
    ("device", "fast", "mode"), [("auto", False, "mixed"), ("cpu", True, "mixed"), ("cpu", False, "fp32")]
)
def test_auto_precision_resolves_for_the_device_of_the_run(monkeypatch, device: str, fast: bool, mode: str) -> None:
    """Accelerators count as fast in bf16; this machine is checked only for run.device=cpu."""
    monkeypatch.setattr(world, "has_fast_bf16", lambda device: fast)
    found = rehearse(recipe_of(1, run={"device": device}, precision={"mode": "auto"}), 1)
    assert found.recipe.precision.mode == rehearsal_json(found)["precision"] == mode
    assert list(found.ranks) == [alone(mode=mode)]


def test_a_rank_needs_the_same_in_a_world_a_thousand_times_larger() -> None:
    """A rank creates only the process groups that it belongs to."""
    parallel = {"tensor": 2, "zero": 0}
    recipes = {world: recipe_of(world, parallel=parallel, batch={"global_batch": world}) for world in (8, 8192)}
    small, large = (rehearse(recipe, world, [0]).ranks[0] for world, recipe in recipes.items())
    assert large.peak == small.peak
    assert large.messages == small.messages


def test_categories_add_up_to_the_peak_and_contain_their_tensors() -> None:
    recipe, report = recipe_of(1), alone()
    parameters = 4 * count_parameters(recipe.model).total
    assert list(report.peak) == list(CATEGORIES)
    assert sum(report.peak.values()) == report.peak_bytes
    assert report.between_steps["parameters"] == report.peak["parameters"] == parameters
    assert 2 * parameters < report.between_steps["optimizer"] < 2 * parameters + 1000, (
        "moments, and a step counter each"
    )
    assert report.between_steps["gradients"] == report.between_steps["loss"] == report.between_steps["temporaries"] == 0


def test_activation_checkpointing_lowers_the_peak_of_a_rehearsal() -> None:
    peaks = [
        rehearse(recipe_of(1, memory={"activation_checkpointing": policy}), 1).ranks[0].peak_bytes
        for policy in ("none", "selective", "full")
    ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_problems_of_all_ranks_are_reported_once() -> None:
    recipe = recipe_of(4, parallel={"pipeline": 4}, memory={"activation_checkpointing": "budget", "budget_gib": 1e-6})
    with pytest.raises(RecipeError) as caught:
        rehearse(recipe, 4, [0, 1, 3])
    assert [problem.path for problem in caught.value.problems] == ["memory.budget_gib"] * 3
    assert "pipeline rank 3" in str(caught.value)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(LaunchError, match="no rank 8 in a world of 8"):
        rehearse(recipe_of(8), 8, [8])


def test_a_process_that_is_killed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    end = PeerEnded("a process of the rehearsal was killed by signal 9")
    process = SimpleNamespace(send=lambda rank: None, receive=Mock(side_effect=end), kill=lambda: None)
    monkeypatch.setattr(world, "start_program", lambda *_, **__: process)
    with pytest.raises(LaunchError, match=r"killed by signal 9\. If memory ran out"):
        rehearse(recipe_of(32, **PIPELINE), 32, processes=2)


def test_several_processes_give_the_result_of_one() -> None:
    recipe = recipe_of(32, **PIPELINE)
    assert rehearsal_json(rehearse(recipe, 32, processes=2)) == rehearsal_json(rehearse(recipe, 32))
    with pytest.raises(RecipeError, match="budget_gib"):
        tight = {"activation_checkpointing": "budget", "budget_gib": 1e-6}
        rehearse(recipe_of(4, parallel={"pipeline": 4}, memory=tight), 4, [0, 3], processes=2)


def test_a_rehearsal_leaves_no_fake_state_behind() -> None:
    recipe = recipe_of(1, precision={"mode": "bf16-sr"})
    rehearsed = rehearse(recipe, 1).ranks[0]
    assert not in_fake_world() and not dist.is_initialized()
    assert type(torch.zeros(1)) is torch.Tensor
    real = rehearse_rank(recipe, Runtime(torch.device("cpu")))
    assert replace(real, trace=()) == replace(rehearsed, trace=()), "on tensors with memory, in the same process"
    # Other kernels differ: the kernel of AdamW is not called without memory, and host_values are not observed.
    assert [event for event in real.trace if event.flops] == [event for event in rehearsed.trace if event.flops]


def test_tensors_have_values_within_host_values() -> None:
    with fake_rank(3, 8) as runtime:
        assert (runtime.rank, runtime.world, dist.get_rank()) == (3, 8, 3)
        assert type(torch.ones(2).sum()) is not torch.Tensor
        with host_values():
            assert int(torch.ones(2).sum()) == 2
        with pytest.raises(LaunchError, match="joined a run"), fake_rank(0, 2):
            pass


def test_a_process_that_has_joined_a_run_cannot_rehearse() -> None:
    assert get_context().get_start_method()  # leaves the process pool of other tests alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match="joined a run"):
            rehearse(recipe_of(2, parallel={"zero": 0}), 2)
    finally:
        dist.destroy_process_group()
