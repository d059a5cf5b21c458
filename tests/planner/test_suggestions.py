"""Whatever a plan suggests, the same program accepts: its commands are run, and its options added to the question."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from hlat.cli import app

RUN = ["--seq", "4096", "--global-batch", "512", "--precision", "mixed"]
QUESTIONS = [
    "--model llama-3.2-1b --chips p5.48xlarge --tokens 100B --deadline 7.5d --budget 48000",
    "--model llama-3.2-1b --chips p5.48xlarge --budget 5k --deadline 3d",
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
]


def plan(arguments: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "400"}, catch_exceptions=True)
    return (1 if done.exception else 0), done.output + (str(done.exception) if done.exception else "")


def suggested(question: list[str], text: str) -> list[list[str]]:
    """The commands that an answer suggests: whole ones, options to change, clusters to take instead."""
    found = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("hlat plan ")]
    for options in re.findall(r"((?:--(?:deadline|budget) \S+ ?)+)leaves room", text):
        words = shlex.split(options)
        kept = [word for index, word in enumerate(question) if word not in words and question[index - 1] not in words]
        found.append(kept + words)
    for cluster, precision in re.findall(r"It would fit on (\S+?)(?: with --precision (\S+))?: tensor", text):
        other = [cluster if question[index - 1] == "--cluster" else word for index, word in enumerate(question)]
        if precision:
            other[other.index("--precision") + 1] = precision
        found.append(other)
    return found


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


@pytest.mark.parametrize("question", QUESTIONS)
def test_suggestions_are_accepted(question: str) -> None:
    assert_accepted(question)


@pytest.mark.slow
@pytest.mark.parametrize("question", MORE_QUESTIONS)
def test_suggestions_of_other_questions_are_accepted(question: str) -> None:
    assert_accepted(question)
