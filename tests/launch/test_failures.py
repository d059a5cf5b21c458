"""A run in which one process fails: the user reads the first failure once, and gets its exit code."""

import pytest

from tests.support.launch.launching import launch


@pytest.fixture
def run_scenario(tmp_path, capfd):
    """Run a scenario; return its exit code, the message to the user, and all other console output."""

    def run(scenario):
        code, message = launch(scenario, tmp_path)
        printed = capfd.readouterr()
        return code, message, printed.out + printed.err

    return run


def test_a_user_error_on_one_rank(run_scenario, tmp_path):
    code, message, console = run_scenario("refused_on_one")
    assert code == 3, "the exit code of a StorageError"
    logs = tmp_path / "run" / "logs"
    assert message == f"rank 1 failed: run.dir /full: no space left\neach rank's log: {logs}/rank-*.log"
    assert console == "", "neither the ranks nor torch elastic print it again"
    assert (logs / "rank-00001.log").read_text().endswith("error: run.dir /full: no space left\n")
    assert "closed by peer" in (logs / "rank-00000.log").read_text(), "the other rank's error is in its log"


def test_a_bug_on_one_rank_while_the_other_waits(run_scenario, tmp_path):
    code, message, console = run_scenario("bug_on_one")
    assert code == 1 and console == ""
    assert (
        message.startswith("rank 1 failed:\nTraceback (most recent call last):\n") and message.count("Traceback") == 1
    )
    assert "\nZeroDivisionError: loss / tokens\neach rank's log: " in message
    assert "ZeroDivisionError: loss / tokens" in (tmp_path / "run/logs/rank-00001.log").read_text()


def test_a_killed_rank_that_the_other_does_not_notice(run_scenario, tmp_path):
    code, message, console = run_scenario("killed")
    assert code == 1 and console == ""
    assert message.startswith("rank 1 was killed by SIGKILL")
    assert f"see {tmp_path}/run/logs/rank-00001.log\n" in message
