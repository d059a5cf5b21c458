"""The HTML report in a real headless browser: its charts are painted, and it makes no requests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hlat.planner.report import html_page, pareto_front_of_plans
from hlat.planner.search.plan import make_plan
from tests.support.planner.requests import request_for

pytestmark = pytest.mark.browser


def open_in_browser(file: Path) -> dict[str, Any]:
    """Observations of Chromium after loading a page."""
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "planner" / "chromium.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_charts_are_drawn_without_network_requests(tmp_path: Path) -> None:
    plan = make_plan(request_for("llama-2-70b", "trn1.32xlarge:32", global_batch=64))
    assert plan.chosen.candidate.pipeline > 1, "a timeline is drawn"
    file = tmp_path / "plan.html"
    file.write_text(html_page([plan]), encoding="utf-8")
    observed = open_in_browser(file)
    assert observed["ok"] and observed["title"] == "llama-2-70b on trn1.32xlarge:32"
    assert observed["table"] == 1 + len(plan.ranked)
    assert observed["requests"] == [file.resolve().as_uri()] and observed["console"] == []
    front, *bars, timeline = observed["pictures"]
    assert len(front) == len(pareto_front_of_plans([plan])) > 2, "filled dots"
    assert len(bars) == len(plan.chosen.memory) + 1 and all(len(bar) > 3 for bar in bars)
    candidate = plan.chosen.candidate
    assert len(timeline) == 2 * candidate.pipeline * candidate.virtual * candidate.accumulation(64)
    wide = [
        (shape["fill"], pixel)
        for shape, pixel in zip(
            (shape for shapes in observed["pictures"] for shape in shapes), observed["pixels"], strict=True
        )
        if shape["width"] >= 4
    ]
    assert len(wide) > 20 and all(fill == pixel for fill, pixel in wide), (
        "painted pixels have the colours of the shapes"
    )


def test_the_browser_reports_requests_errors_and_hidden_charts(tmp_path: Path) -> None:
    """The test itself detects a request, a script error, and a hidden chart."""
    file = tmp_path / "bad.html"
    file.write_text(
        '<title>bad</title><img src="http://127.0.0.1:9/x.png"><table></table>'
        '<svg width="90" height="30" style="opacity: 0"><rect width="90" height="30" fill="#4477aa"/></svg>'
        "<script>nobody()</script>"
    )
    observed = open_in_browser(file)
    assert "http://127.0.0.1:9/x.png" in observed["requests"]
    assert any("nobody is not defined" in line for line in observed["console"])
    assert observed["pixels"] == ["#ffffff"]
