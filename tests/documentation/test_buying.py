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
