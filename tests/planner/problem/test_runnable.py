"""Plans that hlat cannot run are marked in every output; chips without published runs say whose constants they take."""

import pytest

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.cost.calibration import load_constants
from hlat.planner.plan import make_plan, recipe_fragment
from hlat.planner.problem.devices import comparison_note, why_not_runnable
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request
from hlat.planner.problem.workload import CHIP_FAMILIES, FAMILIES, borrowed_constants
from hlat.planner.report.html_report import html_page
from hlat.planner.report.terminal import plan_lines
from hlat.precision import MODES

CATALOG = load_catalog()
GIVEN = {"tokens": 10**9, "sequence": 2048, "global_batch": 64}


def plan_on(cluster, mode):
    return make_plan(
        resolve_request(PlanQuestion("tinyllama-1.1b", precision=mode, **GIVEN), parse_cluster(cluster, CATALOG))
    )


@pytest.mark.parametrize(
    ("cluster", "mode", "reason"),
    [
        ("tpu-v5p:1", "mixed", "no backend for TPU v5p"),
        ("gaudi2:1", "mixed", "no backend for Gaudi 2"),
        ("trn1.32xlarge:1", "mixed", "no backend for Trainium1"),
        ("trn2.48xlarge:1", "fp8", "fp8 on Trainium2"),
        ("tpu-v5p:1", "fp8", "no backend"),
        ("mi300x:1", "fp8", "fp8 on MI300X"),
        ("v100-32gb:1", "mixed", "not in bf16"),
    ],
)
def test_a_plan_that_cannot_run_says_so_in_table_json_page_and_fragment(cluster, mode, reason):
    plan = plan_on(cluster, mode)
    assert reason in plan.to_dict()["for_comparison"]
    table = list(plan_lines([plan], 80))
    assert any("for comparison only" in line and reason in line for line in table)
    assert "for comparison only" in str(html_page([plan]))
    head = recipe_fragment(plan.request, plan.chosen.candidate).partition("parallel:")[0]
    assert "# Does not run as planned, for comparison only" in head and reason in head


@pytest.mark.parametrize(
    ("cluster", "mode"),
    [
        ("h100:1", "fp8"),
        ("8xrtx4090:1", "mixed"),
        ("trn2.48xlarge:1", "mixed"),
        ("mi300x:1", "mixed"),
        ("v100:1", "fp32"),
    ],
)
def test_a_plan_that_runs_has_no_such_note(cluster, mode):
    plan = plan_on(cluster, mode)
    assert plan.to_dict()["for_comparison"] is None
    assert "comparison" not in recipe_fragment(plan.request, plan.chosen.candidate)


def test_every_chip_and_mode_has_an_answer():
    """Chips without a backend never run; those of NVIDIA from Ampere on run in every 16-bit mode."""
    for chip in CATALOG.chips:
        for mode in MODES:
            why = why_not_runnable(chip, mode)
            assert why or chip.device
            modern = chip.device == "cuda" and chip.vendor == "nvidia" and chip.capability >= (8, 0)
            assert not (why and modern and mode != "fp8")


def test_chips_without_published_runs_borrow_constants_and_say_it():
    assert {chip.family for chip in CATALOG.chips} <= set(FAMILIES)
    for family in CHIP_FAMILIES.values():
        assert all(load_constants()._for(name, family.name) > 0 for name in ("products", "link", "second_flash"))
        if family.like:
            own, near = (load_constants()._for("second_flash", name) for name in (family.name, family.like))
            assert own == near and family.like in borrowed_constants(family.name)
    request = resolve_request(PlanQuestion("tinyllama-1.1b", **GIVEN), parse_cluster("mi300x:1", CATALOG))
    assert any("only the rate of products was fitted to cdna chips" in one for one in request.assumed)
    assert not comparison_note(request)
