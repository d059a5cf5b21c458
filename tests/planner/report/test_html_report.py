"""The plan's page in headless Chromium: charts with data at the widths of a phone and a desktop, and no requests."""

from pathlib import Path

import pytest

from hlat.planner.plan import make_plan
from hlat.planner.report.comparison import pareto_front_of_plans
from hlat.planner.report.html_report import html_page
from tests.support.browser import DESKTOP, PHONE, serious_problems, visit
from tests.support.planner.requests import request_for

pytestmark = pytest.mark.browser

_OBSERVE = """
    const shapes = (figure, selector) => [...figure.querySelectorAll("svg[role=img] " + selector)];
    return {
        width: document.documentElement.scrollWidth, title: document.title,
        rows: document.querySelector("table").rows.length,
        filled: shapes(document.querySelector("figure.scatter"), "circle.dot[fill^='#']").length,
        rings: shapes(document.querySelector("figure.scatter"), "circle.halo").length,
        bars: [...document.querySelectorAll("figure.bar")]
            .map((figure) => shapes(figure, "rect").map((rect) => rect.getAttribute("fill"))),
        passes: shapes(document.querySelector("figure.timeline"), "rect").length,
        scripts: document.scripts.length,
        hit: shapes(document.querySelector("figure.bar"), "rect").filter((rect) => {
            rect.scrollIntoView();
            const box = rect.getBoundingClientRect();
            return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 4) === rect;
        }).length,
    };
"""


@pytest.fixture(scope="module")
def plan():
    """A plan with a pipeline."""
    found = make_plan(request_for("llama-2-70b", "trn1.32xlarge:32", global_batch=64))
    assert found.chosen.candidate.pipeline > 1, "a timeline is drawn"
    return found


def test_charts_are_drawn_without_network_requests(plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(html_page([plan]), encoding="utf-8")
    seen = visit(file.as_uri(), _OBSERVE)
    assert seen.requests == [file.as_uri()] and seen.console == []
    for result, view in zip(seen.results, (PHONE, DESKTOP), strict=True):
        assert result["width"] <= view["width"] and result["scripts"] == 0
        assert result["title"] == "llama-2-70b on trn1.32xlarge:32" and result["rows"] == 1 + len(plan.ranked)
        assert result["filled"] == len(pareto_front_of_plans([plan])) > 2 and result["rings"] == 1
        assert len(result["bars"]) == len(plan.chosen.memory) + 1
        assert all(len(bar) > 3 and len(set(bar)) == len(bar) for bar in result["bars"])
        candidate = plan.chosen.candidate
        assert result["passes"] == 2 * candidate.pipeline * candidate.virtual * candidate.accumulation(64)
        assert result["hit"] >= 3, "parts are where they are seen"


def test_axe_core_finds_nothing_serious(plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(html_page([plan]), encoding="utf-8")
    assert serious_problems(file.as_uri()) == []
