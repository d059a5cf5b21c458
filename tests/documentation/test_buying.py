"""The page of a buyer's questions: every command gives the output that is printed there, on 80 columns."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import hlat

PAGE = Path(__file__).parents[2] / "docs" / "buying.md"
ASKED = re.findall(
    r"^```console\n\$ (hlat plan [^\n]*)\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.M
)


@pytest.mark.parametrize(("command", "output"), ASKED, ids=[str(number) for number in range(1, len(ASKED) + 1)])
def test_the_output_is_todays(command: str, output: str) -> None:
    result = hlat(*shlex.split(command)[1:], env={**os.environ, "COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip() == output


def test_there_are_ten_questions_and_their_outputs_fit_80_columns() -> None:
    """But for the command that is suggested, which is in one line so that it can be copied."""
    numbered = re.findall(r"^## (\d+)\. ", PAGE.read_text(encoding="utf-8"), re.M)
    assert numbered == [str(number) for number in range(1, 11)] and len(ASKED) >= 10
    lines = [line for _, output in ASKED for line in output.splitlines() if "Its plan: " not in line]
    assert max(map(len, lines)) <= 80


def test_tables_of_clusters_have_the_choice_first_and_intervals() -> None:
    for command, output in ASKED:
        if "--chips" in command:
            tables = re.findall(r"^( +(?:cluster|model) .*)\n(.*)$", output, re.M)
            assert tables and all("4 of 5" in head and first.startswith("* ") for head, first in tables)
