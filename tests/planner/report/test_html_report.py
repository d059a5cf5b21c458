"""The page of a plan in a real headless browser: what it draws is seen, and it asks nobody for anything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hlat.planner.report import html_page, pareto_front_of_plans
from hlat.planner.search.plan import make_plan
from tests.support.planner.questions import question

pytestmark = pytest.mark.browser


def opened(file: Path) -> dict[str, Any]:
    """What Chromium saw of a page."""
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "planner" / "chromium.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_pictures_are_there_and_nothing_is_asked_of_a_network(tmp_path: Path) -> None:
    answer = make_plan(question("llama-2-70b", "trn1.32xlarge:32", global_batch=64))
    assert answer.chosen.candidate.pipeline > 1, "a timeline is drawn"
    file = tmp_path / "plan.html"
    file.write_text(html_page([answer]), encoding="utf-8")
    seen = opened(file)
    assert seen["ok"] and seen["title"] == "llama-2-70b on trn1.32xlarge:32"
    assert seen["table"] == 1 + len(answer.ranked)
    assert seen["requests"] == [file.resolve().as_uri()] and seen["console"] == []
    front, *bars, timeline = seen["pictures"]
    assert len(front) == len(pareto_front_of_plans([answer])) > 2, "filled dots"
    assert len(bars) == len(answer.chosen.memory) + 1 and all(len(bar) > 3 for bar in bars)
    candidate = answer.chosen.candidate
    assert len(timeline) == 2 * candidate.pipeline * candidate.virtual * candidate.accumulation(64)
    wide = [
        (shape["fill"], pixel)
        for shape, pixel in zip((one for shapes in seen["pictures"] for one in shapes), seen["pixels"], strict=True)
        if shape["width"] >= 4
    ]
    assert len(wide) > 20 and all(fill == pixel for fill, pixel in wide), "what is painted is what was drawn"


def test_a_page_that_misbehaves_is_noticed(tmp_path: Path) -> None:
    """The test's own eyes: a request, an error, and a picture that is hidden are seen as such."""
    file = tmp_path / "bad.html"
    file.write_text(
        '<title>bad</title><img src="http://127.0.0.1:9/x.png"><table></table>'
        '<svg width="90" height="30" style="opacity: 0"><rect width="90" height="30" fill="#4477aa"/></svg>'
        "<script>nobody()</script>"
    )
    seen = opened(file)
    assert "http://127.0.0.1:9/x.png" in seen["requests"]
    assert any("nobody is not defined" in line for line in seen["console"])
    assert seen["pixels"] == ["#ffffff"]
