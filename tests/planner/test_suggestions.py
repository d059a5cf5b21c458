"""Whatever a plan suggests, the same program accepts: its commands are run, and its options added to the question."""

import json
import re
import shlex
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from hlat.cli import app
from hlat.planner.offers import parse_goal

RUN = ["--sequence-length", "4096", "--global-batch", "512", "--precision", "mixed"]
QUESTIONS = [
    "--model llama-3.2-1b --chips p5.48xlarge --tokens 100B --deadline 7.5d --budget 48000",
    "--model llama-3.2-1b --chips p5.48xlarge --budget 6k --deadline 3d",
]
MORE_QUESTIONS = [
    "--model llama-3.1-70b --cluster p5.48xlarge:1 --tokens 10B",
    "--model llama-3.1-8b --chips any --tokens 300B --deadline 14d --budget 90000",
    "--model llama-3.1-8b --chips p5.48xlarge --tokens 300B --deadline 14d --budget 90000",
    "--model llama-3.1-8b --chips p5.48xlarge --tokens 300B --deadline 14d",
    "--model llama-3.1-8b --chips p5.48xlarge --tokens 300B --budget 90000",
    "--model llama-3.1-8b --chips p5.48xlarge,p5en.48xlarge --tokens 300B --deadline 1d",
    "--model llama-3.1-8b --chips trn2.48xlarge --tokens 300B --deadline 30d",
    "--model llama-3.1-8b --chips p4d.24xlarge --budget 20k",
    "--model llama-3.1-8b --chips p4d.24xlarge --budget 20k --deadline 2d",
    "--model llama-3.1-8b --chips h100 --tokens 100B --price 2.10/h --deadline 10d",
    "--model meta-llama/Llama-3.1-8B --chips p5.48xlarge --tokens 100B",
    "--chips p5.48xlarge --budget 20k",
    "--chips p5.48xlarge --budget 20k --deadline 3d",
    "--chips p5.48xlarge --flops 1e21",
    "--chips p5.48xlarge --flops 1e21 --inference-tokens 1T",
    "--model llama-3.1-405b --cluster p5.48xlarge:4 --tokens 10B",
    "--model llama-3.1-405b --cluster p5.48xlarge:4 --tokens 10B --price capacity-block",
    "--model llama-3.1-70b --cluster p4d.24xlarge:1 --tokens 10B --price on-demand",
    "--model llama-3.1-70b --cluster trn1.32xlarge:1 --tokens 10B",
    "--model llama-3.1-70b --cluster h100:2 --per chip --tokens 10B",
    "--model llama-3.1-70b --cluster rtx4090:2 --per chip --tokens 10B --price 0.4/h",
    "--model llama-3.1-70b --cluster p4d.24xlarge:1 --tokens 10B --prices-of 2024-04 --interruptions 0.5",
    "--model llama-3.1-70b --cluster h100:1 --tokens 10B --network '8x200 Gb/s' --price 2.10/h",
    "--model hlat-70b --cluster trn1.32xlarge:8 --tokens 10B",
]


def plan(arguments: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "400"}, catch_exceptions=True)
    return (1 if done.exception else 0), done.output + (str(done.exception) if done.exception else "")


def changed(question: list[str], options: list[str]) -> list[str]:
    """The question with some options instead of its own."""
    names = {word for word in options if word.startswith("--")}
    kept = [word for index, word in enumerate(question) if not {word, question[index - 1]} & names]
    return kept + options


def suggested(question: list[str], text: str) -> list[list[str]]:
    """The commands that an answer suggests: whole ones, options to change, clusters to take instead."""
    found = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("hlat plan ")]
    for options in re.findall(r"((?:--(?:deadline|budget) \S+ ?)+)leaves room", text):
        found.append(changed(question, shlex.split(options)))
    for cluster, options in re.findall(r"It would fit on (\S+?)(?: with (--[^:]+))?: tensor", text):
        found.append(changed(question, ["--cluster", cluster, *shlex.split(options)]))
    return found


def assert_true(question: list[str], text: str) -> None:
    """Compare what an answer claims of its suggestions with what they answer."""
    for cluster, options, claim in re.findall(
        r"It would fit on (\S+?)(?: with (--[^:]+))?: tensor[^;]*; [^;]* GiB; (.*)\.$", text, re.MULTILINE
    ):
        _, again = plan(changed(question, ["--cluster", cluster, *shlex.split(options)]))
        assert claim in again, f"{claim}\n{again}"
    goal = dict(pairwise(question))
    if room := re.search(r"--deadline (\S+) leaves room", text):
        content = json.loads(plan([*changed(question, ["--deadline", room[1]]), "--json"])[1])
        wanted = parse_goal(goal["--deadline"], None).days
        assert content["chosen"]["days_interval"][1] <= wanted
    if sure := re.search(r"Within the goal over the whole range: ([^ ,]+(?:, [^ ,]+)*)\.", text):
        limit, (command,) = parse_goal(goal.get("--deadline"), goal.get("--budget")), suggested([], text)
        for cluster in sure[1].split(", "):
            again = json.loads(plan([*changed(command, ["--cluster", cluster]), "--json"])[1])["chosen"]
            assert limit.days is None or again["days_interval"][1] <= limit.days
            # A budget that chose the tokens limits no cost.
            assert limit.usd is None or "--tokens" not in question or again["cost_usd_interval"][1] <= limit.usd


def assert_accepted(words: str) -> None:
    question = [*shlex.split(words), *RUN]
    code, text = plan(question)
    if code:
        assert "fit" in text or "no cluster meets the goal" in text, text
    answers = suggested(question, text)
    for suggestion in answers:
        again, why = plan(suggestion)
        assert again == 0, f"{shlex.join(question)}\nsuggests {shlex.join(suggestion)}\n{why}"
    assert answers or "no cluster meets" in text, text
    assert_true(question, text)


@pytest.mark.parametrize("question", QUESTIONS)
def test_suggestions_are_accepted(question: str) -> None:
    assert_accepted(question)


@pytest.mark.slow
@pytest.mark.parametrize("question", MORE_QUESTIONS)
def test_suggestions_of_other_questions_are_accepted(question: str) -> None:
    assert_accepted(question)
