"""Options of ``hlat evaluate`` that contradict each other are refused, all at once, before anything is loaded."""

import pytest
import typer

from hlat.cli import app
from hlat.launch.evaluation_job import EvaluationJob
from hlat.runtime.errors import LaunchError


@pytest.mark.parametrize(
    ("words", "refused", "of"),
    [
        (["run", "--nproc", "2", "--limit", "3"], "--limit, --nproc", "an evaluation without --tasks"),
        (["run", "--once"], "--once", "an evaluation without --tasks"),
        (["run", "--tasks", "a", "--watch", "--data", "d"], "--data, --watch", "--tasks and --suite"),
        (["run", "--watch", "--data", "d"], "--data", "--watch"),
        (["--render", "x.jsonl", "--tasks", "a", "--weights", "ema"], "--weights", "--render"),
        (["run", "--render", "x.jsonl", "--tasks", "a"], "CHECKPOINT", "--render"),
    ],
)
def test_an_option_without_effect_is_refused(cli, tmp_path, words, refused, of):
    done = cli("evaluate", *words)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"error: {refused}: no part of {of}")


def test_something_to_evaluate_is_needed(cli):
    done = cli("evaluate")
    assert done.returncode == 2 and "name a run folder" in done.stderr


@pytest.mark.parametrize(
    ("words", "value", "job"),
    [
        (["run"], None, False),
        (["--allow-code-execution", "run"], "sandbox", True),
        (["run", "--allow-code-execution=unsafe"], "unsafe", "unsafe"),
    ],
)
def test_code_execution_takes_an_optional_value_and_no_other_word(words, value, job):
    verb = typer.main.get_command(app).commands["evaluate"]
    found = verb.make_context("evaluate", list(words)).params
    assert (found["checkpoint"], found["allow_code_execution"]) == ("run", value)
    again = EvaluationJob("run", "a", allow_code_execution=job).arguments()  # of further processes
    assert [word for word in again if "code" in word] == [word for word in words if "code" in word]


def test_another_permission_is_refused(cli):
    done = cli("evaluate", "run", "--tasks", "a", "--allow-code-execution=yes")
    assert done.returncode == 2 and "--allow-code-execution=yes: the only value is unsafe" in done.stderr
    with pytest.raises(LaunchError):  # through the API: no word but this one counts as a permission
        EvaluationJob("run", "a", allow_code_execution="safe").load_suite()
