"""``hlat check``: what a layout amounts to on so many processes, and what a user sees of an impossible one."""

import pytest
from typer.testing import CliRunner

from hlat.cli import app


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["hlat-70b", "--world", "8192"],
         "8192 processes = pipeline 8 x data 32 x context 1 x tensor 32, ZeRO 1, 32 micro-batches"),
        (["hlat-70b"], "N x 256 processes = pipeline 8 x data N x context 1 x tensor 32, ZeRO 1"),
        (["tiny-shakespeare", "data.path=x", "--world", "1"],
         "1 process = pipeline 1 x data 1 x context 1 x tensor 1, 1 micro-batch"),
        (["quickstart", "data.path=x", "--world", "4", "batch.micro_batch=1", "parallel.replicas=2"],
         "4 processes = pipeline 1 x data 4 x context 1 x tensor 1, ZeRO 1 in 2 replicas, 2 micro-batches"),
    ],
)  # fmt: skip
def test_check_says_what_the_layout_comes_to(arguments, line):
    done = CliRunner().invoke(app, ["check", "--no-files", *arguments])
    assert done.exit_code == 0 and f"  layout {line}\n" in done.output, done.output
    # On how many processes, not on which machines: nothing is known of their memory, and "good" does not mean that.
    assert ("  memory not checked: --on INSTANCE:N" in done.output) == ("--world" in arguments)


def test_check_says_nothing_of_a_layout_that_nobody_asked_for():
    done = CliRunner().invoke(app, ["check", "--no-files", "quickstart", "data.path=x"])
    assert done.exit_code == 0 and "good" in done.output and "layout" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.tensor=3"], "parallel.tensor = 3: model.heads 4 cannot be shared out evenly over it; "
         "model.kv_heads 2 can neither be shared out nor copied evenly over it. Try 2 or 4."),
        (["--world", "6", "parallel.tensor=4"], "world = 6: each model takes pipeline 1 x context 1 x tensor 4 = 4 "
         "processes, and the number is not a multiple of that. Try 4 or 8 processes, or "
         "parallel.tensor=1 or 2."),
        (["--world", "4", "parallel.pipeline=2", "parallel.zero=2"], "parallel.zero = 2: a pipeline keeps gradients "
         "whole until its last micro-batch, so that 2 would need the memory of 1. Try 1 or 3."),
    ],
)  # fmt: skip
def test_an_impossible_layout_is_one_line_and_exit_code_2(cli, recipe_file, tiny, arguments, message):
    done = cli("check", recipe_file, *tiny, "batch.micro_batch=1", "batch.global_batch=24", *arguments)
    assert done.returncode == 2 and done.stdout == "", done
    option = ["  The number of processes is set by --nproc or --world."] if " processes, or" in message else []
    assert done.stderr.rstrip().splitlines()[1:] == [f"  {message}", *option], done.stderr
