"""Options of ``hlat evaluate`` that contradict each other are refused, all at once, before anything is loaded."""

import pytest


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
