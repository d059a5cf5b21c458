"""The table of a plan: its layouts are those that --layout takes, and it fits a terminal of 80 columns."""

import pytest

import hlat
from hlat.planner.cost.calibration import undecided_ratio
from hlat.planner.plan import TrainingPlan
from hlat.planner.problem.layouts import candidates, layout_text, parse_layout
from hlat.planner.report.terminal import WIDE, headline, plan_lines
from tests.support.planner.requests import request_for


@pytest.fixture(scope="module")
def plans() -> list[TrainingPlan]:
    return [
        hlat.plan("llama-2-7b", cluster, sequence=4096, global_batch=256)
        for cluster in ("trn1.32xlarge:8", "p4d.24xlarge:4")
    ]


def test_a_layout_in_words_is_read_as_the_same_layout() -> None:
    for request in (request_for("llama-2-7b", "trn1.32xlarge:4"), request_for("llama-2-70b", "h100:4")):
        every = list(candidates(request))
        assert every and all(parse_layout(layout_text(one), request) == one for one in every[::7])


def test_a_narrow_table_has_at_most_80_columns_and_all_layouts(plans: list[TrainingPlan]) -> None:
    lines = list(plan_lines(plans, 80))
    assert max(map(len, lines)) <= 80
    for plan in plans:
        texts = [layout_text(one.candidate) for one in (plan.chosen, *plan.alternatives)]
        start = lines.index(headline(plan)) + 2
        assert [line.split()[-1] for line in lines[start : start + len(texts)]] == texts


@pytest.mark.parametrize("columns", [80, WIDE])
def test_the_choice_of_each_cluster_is_first_and_marked(plans: list[TrainingPlan], columns: int) -> None:
    lines = list(plan_lines(plans, columns))
    marked = [line for line in lines if line.startswith(">") and "the choice" not in line]
    assert len(marked) == len(plans)
    for line, plan in zip(marked, plans, strict=True):
        assert f"{plan.chosen.mfu:.1%}" in line


def test_layouts_that_may_be_the_fastest_are_marked(plans: list[TrainingPlan]) -> None:
    """By hand from the ratio that ships: those less than 9.2 % slower than the fastest, and no others."""
    for plan in plans:
        lines = list(plan_lines([plan], 80))[2:]
        everyone = [plan.chosen, *plan.alternatives]
        limit = min(one.step_seconds for one in everyone) * undecided_ratio()
        marked = [line[2] == "~" for line in lines[: len(everyone)]]
        assert marked == [one.step_seconds < limit for one in everyone] and any(marked) and not all(marked)
        content = plan.to_dict()
        assert [one["may_be_fastest"] for one in (content["chosen"], *content["alternatives"])] == marked
