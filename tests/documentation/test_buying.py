"""Pages of buyers' questions and of planning: every command gives the output that is printed there, on 80 columns."""

import json
import os
import re
import shlex
from math import exp, hypot
from pathlib import Path

import pytest

from hlat.planner.cost.calibration import shipped_interval
from tests.support.commands import hlat
from website.planned_numbers import PRINTED, shown

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "buying.md").read_text(encoding="utf-8")
PLANNING = (DOCS / "planning.md").read_text(encoding="utf-8")
ASKED = [(command.replace("\\\n", " "), output) for command, output in PRINTED.findall(PAGE + PLANNING)]


@pytest.mark.parametrize(("command", "output"), ASKED, ids=[str(number) for number in range(1, len(ASKED) + 1)])
def test_the_output_is_todays(command: str, output: str) -> None:
    result = hlat(*shlex.split(command)[1:], env={**os.environ, "COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert shown(result.stdout.rstrip(), output) == output


def test_there_are_ten_questions_and_their_outputs_fit_80_columns() -> None:
    numbered = re.findall(r"^## (\d+)\. ", PAGE, re.M)
    assert numbered == [str(number) for number in range(1, 11)]
    assert len(ASKED) == (PAGE + PLANNING).count("```console") >= 10
    assert max(len(line) for _, output in ASKED for line in output.splitlines()) <= 80


def test_tables_of_clusters_have_the_choice_first_and_intervals() -> None:
    for command, output in ASKED:
        if "--chips" in command:
            tables = re.findall(r"^( +(?:cluster|size) .*)\n(.*)$", output, re.M)
            assert tables and all("4 of 5" in head and first.startswith("* ") for head, first in tables)


def test_the_papers_comparison_is_undecidable() -> None:
    """The range of Trainium's share of the A100's cost, at the prices of then, contains the paper's 60 % and 100 %."""
    [asked] = [command for command, _ in ASKED if "--prices-of" in command]
    trainium, a100 = (plan["chosen"]["cost_usd"] for plan in json.loads(hlat(*shlex.split(asked)[1:], "--json").stdout))
    # Errors of two families are independent; 80 % of a normal distribution are within 1.2816 deviations.
    deviations = (shipped_interval(name, eight_bit=False).deviation for name in ("trainium", "ampere"))
    share, spread = trainium / a100, exp(1.2816 * hypot(*deviations))
    assert share / spread < 0.6 and share * spread > 1
    words = " ".join(PAGE.split())
    assert f"costs {100 * share:.0f} % of what the A100 costs" in words
    assert f"between {100 * share / spread:.0f} and {100 * share * spread:.0f} %" in words
