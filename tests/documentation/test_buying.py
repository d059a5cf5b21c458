"""The page of a buyer's questions: every command gives the output that is printed there, on 80 columns."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import hlat
from website.planned_numbers import PRINTED

PAGE = (Path(__file__).parents[2] / "docs" / "buying.md").read_text(encoding="utf-8")
ASKED = [(command.replace("\\\n", " "), output) for command, output in PRINTED.findall(PAGE)]


@pytest.mark.parametrize(("command", "output"), ASKED, ids=[str(number) for number in range(1, len(ASKED) + 1)])
def test_the_output_is_todays(command: str, output: str) -> None:
    result = hlat(*shlex.split(command)[1:], env={**os.environ, "COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip() == output


def test_there_are_ten_questions_and_their_outputs_fit_80_columns() -> None:
    numbered = re.findall(r"^## (\d+)\. ", PAGE, re.M)
    assert numbered == [str(number) for number in range(1, 11)]
    assert len(ASKED) == PAGE.count("```console") >= 10
    assert max(len(line) for _, output in ASKED for line in output.splitlines()) <= 80


def test_tables_of_clusters_have_the_choice_first_and_intervals() -> None:
    for command, output in ASKED:
        if "--chips" in command:
            tables = re.findall(r"^( +(?:cluster|size) .*)\n(.*)$", output, re.M)
            assert tables and all("4 of 5" in head and first.startswith("* ") for head, first in tables)


def test_the_papers_comparison_is_undecidable() -> None:
    """The range of Trainium's share of the A100's cost, at the prices of then, contains the paper's 60 % and 100 %."""
    [output] = [output for command, output in ASKED if command.count("--cluster") == 2 and "--prices-of" in command]
    cheapest = " ".join(output.partition("Cheapest: ")[2].split())
    found = re.match(r"trn1.32xlarge:64, .*p4d.24xlarge:64 \((\d+)% of it, (\d+)% to (\d+)% in 4 of 5 cases", cheapest)
    assert found is not None
    share, low, high = map(int, found.groups())
    assert low < 60 < high and low < share < 100 < high
