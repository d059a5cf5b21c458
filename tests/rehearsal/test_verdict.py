"""The verdict on memory: tensors, runtime and allocator against a device, and changes that help."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.hardware import Cluster, load_catalog, parse_cluster
from hlat.planner import recipe_fit
from hlat.planner.memory import rank_memory
from hlat.planner.problem.layouts import recipe_step
from hlat.rehearsal import Rehearsal, parse_device, rehearse, verdict_lines
from hlat.runtime.errors import PlanError
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

# Two sequences of 2,048 tokens through four layers: 2.1 GiB of tensors, most of them activations.
DEEP: dict[str, Any] = {
    "model": {**SMALL["model"], "hidden_size": 512, "intermediate_size": 8192, "max_sequence_length": 2048},
    "data": {**SMALL["data"], "sequence_length": 2048},
    "batch": {"global_batch": 16, "micro_batch": 2},
    "precision": {"mode": "mixed"},
}


def cluster_of(gib: float) -> Cluster:
    """Eight chips with this much memory."""
    cluster = parse_cluster("p5.48xlarge:1", load_catalog())
    memory = cluster.chip.memory
    assert memory is not None
    return replace(cluster, chip=cluster.chip.model_copy(update={"memory": memory.model_copy(update={"gib": gib})}))


def deep(**sections: dict[str, Any]) -> Recipe:
    return recipe_of(8, parallel={"zero": 1}, **{**DEEP, **sections})


def on_device(recipe: Recipe, cluster: Cluster) -> Rehearsal:
    """Rehearse rank 0 as on the cluster's chips."""
    return rehearse(recipe, 8, [0], device=parse_device(None, cluster, load_catalog()), cluster=cluster)


@cache
def rehearsed(gib: float) -> Rehearsal:
    """The recipe on such a cluster."""
    return on_device(deep(), cluster_of(gib))


def test_a_rank_that_fits_fits_by_the_rule_of_the_plan() -> None:
    found = rehearsed(80)
    verdict = found.verdict
    assert verdict is not None and found.plan is not None and verdict.fits and verdict.remedies == ()
    planned = rank_memory(found.plan.request, found.plan.prediction.candidate, 0)
    assert verdict.tensors == found.ranks[0].peak_bytes and verdict.runtime == planned.runtime
    assert verdict.needed == pytest.approx(planned.total, rel=0.03), "the tolerance of all planned memory"
    before_a_start = recipe_fit(deep(), cluster_of(80))
    assert before_a_start.fits and before_a_start.needed == pytest.approx(verdict.needed, rel=0.03)


@pytest.mark.parametrize("policy", ["none", pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_scores_that_attention_keeps_without_a_fused_kernel_are_counted(policy: str) -> None:
    """No kernel of a GPU is fused for grouped heads in fp32: the scores of 2,048 tokens are most of the memory."""
    model = {**DEEP["model"], "intermediate_size": 1024, "heads": 16, "kv_heads": 4, "layers": 2}
    recipe = deep(model=model, precision={"mode": "fp32"}, memory={"activation_checkpointing": policy})
    verdict = on_device(recipe, cluster_of(80)).verdict
    assert verdict is not None and verdict.tensors > 2 * 16 * 2048**2 * 4
    assert recipe_fit(recipe, cluster_of(80)).needed == pytest.approx(verdict.needed, rel=0.03)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_the_ends_that_are_reduced_between_micro_batches_are_counted(count: int) -> None:
    """ZeRO 2: embedding and head, most of this model, are reduced while all parameters are gathered."""
    model = {**DEEP["model"], "vocab_size": 65_536, "intermediate_size": 1024, "layers": 2}
    batch, memory = {"global_batch": 8 * count, "micro_batch": 1}, {"activation_checkpointing": "full"}
    recipe = recipe_of(8, **{**DEEP, "model": model, "batch": batch}, memory=memory, parallel={"zero": 2})
    verdict = on_device(recipe, cluster_of(80)).verdict
    assert verdict is not None
    without_runtime = recipe_fit(recipe, cluster_of(80)).needed - verdict.runtime
    assert without_runtime == pytest.approx(verdict.needed - verdict.runtime, rel=0.03)


def test_what_does_not_fit_names_the_rank_and_changes_that_help() -> None:
    """The witness of a remedy is a rehearsal with it."""
    needed = rehearsed(80).verdict.needed  # type: ignore[union-attr]
    gib = (needed - (64 << 20)) / 0.96 / 2**30
    found = rehearsed(gib)
    verdict = found.verdict
    assert verdict is not None and not verdict.fits and verdict.rank == 0
    overrides = [remedy.override for remedy in verdict.remedies]
    before_a_start = recipe_fit(deep(), cluster_of(gib))
    assert not before_a_start.fits and before_a_start.remedies[:4] == verdict.remedies
    assert "batch.micro_batch=1" in overrides
    assert [each.step_seconds for each in verdict.remedies] == sorted(each.step_seconds for each in verdict.remedies)
    content = {"parallel": {"zero": 1}, "memory": {}, **SMALL, **DEEP}
    section, _, rest = overrides[0].partition(".")
    name, _, value = rest.partition("=")
    content[section] = {**content.get(section, {}), name: int(value) if value.isdecimal() else value}
    helped = on_device(parse_recipe(content, world=8), cluster_of(gib)).verdict
    assert helped is not None and helped.fits
    lines = list(verdict_lines(found, 80))
    assert lines[0].startswith("memory: DOES NOT FIT. Rank 0,") and max(map(len, lines)) <= 80
    assert found.to_dict()["memory_verdict"]["remedies"][0]["override"] == overrides[0]


def test_without_a_plan_the_verdict_stands_and_the_reason_is_said() -> None:
    found = rehearse(recipe_of(2), 2, [0], cluster=cluster_of(80))
    assert found.plan is None and found.timelines == () and found.verdict is not None and found.verdict.fits
    assert found.not_planned == "the run has 2 processes, p5.48xlarge:1 8 devices"
    assert found.to_dict()["time"] is None and found.to_dict()["time_not_predicted"] == found.not_planned
    tiny = rehearse(recipe_of(2), 2, [0], cluster=cluster_of(1))
    assert tiny.verdict is not None and not tiny.verdict.fits
    assert "hlat plan" in "".join(verdict_lines(tiny))


def test_a_memory_budget_is_not_predicted() -> None:
    budget = recipe_of(8, memory={"activation_checkpointing": "budget", "budget_gib": 1})
    with pytest.raises(PlanError, match="activation_checkpointing=budget is not predicted"):
        recipe_step(budget, cluster_of(80))


def test_the_command_ends_with_1_if_it_does_not_fit(recipe_file: Path, tmp_path: Path, cli) -> None:
    """The world size is the cluster's. 96 % of 2.05 GiB do not hold the 2 GiB of a GPU's runtime."""
    catalog = tmp_path / "tiny.yaml"
    catalog.write_text(
        """
sources: {me: measured by myself}
chips:
  - {name: Tiny, names: [Tiny chip], vendor: nvidia, device: cuda, capability: [9, 0], family: hopper,
     memory: {gib: 2.05, gb_per_second: 100, source: me}, tflops: {bfloat16: {dense: 100, source: me}}}
instances:
  - {name: tiny-box, chip: Tiny, chips: 2, domain: 2, link: 100, network: 10, source: me,
     failures: {per_day: 0.004, source: me}}
"""
    )
    words = ("rehearse", recipe_file, "data.path=none", "--hardware", catalog, "--cluster", "tiny-box:1", "--json")
    done = cli(*words)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["world"] == 2 and found["memory_verdict"]["fits"] is False
    assert found["time"]["cluster"] == "tiny-box:1" and found["time"]["step_seconds"] > 0
