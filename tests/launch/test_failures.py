"""A run in which one process fails: the user reads the first failure, once, and the exit code is that failure's."""

import pytest

from tests.support.launch.launching import launch


@pytest.fixture
def ended(tmp_path, capfd):
    """Run a scenario: (exit code, what was said, what else stood on the console)."""

    def run(scenario):
        code, said = launch(scenario, tmp_path)
        shown = capfd.readouterr()
        return code, said, shown.out + shown.err

    return run


def test_a_users_mistake_on_one_rank(ended, tmp_path):
    code, said, console = ended("refused_on_one")
    assert code == 3, "the exit code of a StorageError"
    logs = tmp_path / "run" / "logs"
    assert said == f"rank 1 failed: run.dir /full: no space left\neach rank's log: {logs}/rank-*.log"
    assert console == "", "nothing of it twice: neither by the ranks nor by elastic"
    assert (logs / "rank-00001.log").read_text().endswith("error: run.dir /full: no space left\n")
    assert "closed by peer" in (logs / "rank-00000.log").read_text(), "what the other saw is kept in its log"


def test_a_bug_on_one_rank_while_the_other_waits_for_it(ended, tmp_path):
    code, said, console = ended("bug_on_one")
    assert code == 1 and console == ""
    assert said.startswith("rank 1 failed:\nTraceback (most recent call last):\n") and said.count("Traceback") == 1
    assert "\nZeroDivisionError: loss / tokens\neach rank's log: " in said
    assert "ZeroDivisionError: loss / tokens" in (tmp_path / "run/logs/rank-00001.log").read_text()


def test_a_killed_rank_and_one_that_does_not_notice(ended, tmp_path):
    code, said, console = ended("killed")
    assert code == 1 and console == ""
    assert said.startswith("rank 1 was killed by SIGKILL")
    assert f"see {tmp_path}/run/logs/rank-00001.log\n" in said
