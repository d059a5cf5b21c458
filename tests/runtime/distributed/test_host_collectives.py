"""Three real processes of one run: exchanged values, common errors, consistency checks, logs and console output."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.launch.launching import ROOT

REFUSED = "recipe: 1 problem\n  model.heads = 9: too many take 4"
DISAGREE = "the processes of this run were started differently:\n"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """Run the scenario ``collectives`` once, through the launcher as a command; return (folder, process)."""
    folder = tmp_path_factory.mktemp("collectives")
    command = [sys.executable, "-m", "tests.support.launch.launcher", "3", "collectives", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def recorded(scenario):
    """Values that each rank recorded."""
    return [json.loads((scenario[0] / f"seen-{rank}.json").read_text()) for rank in range(3)]


def result(value):
    return {"result": value}


def error(kind, message, rank=None):
    return {"type": kind, "message": message, "from": rank}


def test_values_reach_the_ranks_they_are_for(recorded):
    for rank, values in enumerate(recorded):
        assert values["world"] == 3 and values["is_first"] == (rank == 0)
        assert values["broadcast"] == {"from": 0}
        assert values["gather"] == ([0, 1, 4] if rank == 0 else None)
        assert values["all_gather"] == [[], [1], [2, 2]]
        assert values["all_reduce"] == 6.0


def test_an_action_on_rank_0_gives_every_rank_its_result_or_error(recorded):
    for rank, values in enumerate(recorded):
        origin = None if rank == 0 else 0
        assert values["first"] == result({"asked": 0})
        assert values["first_refused"] == error("RecipeError", REFUSED, origin)
        assert values["problems"] == ["model.heads"], (
            "the typed error arrives with its attributes, not only its message"
        )
    assert recorded[0]["first_bug"] == error("ZeroDivisionError", "oh")
    for values in recorded[1:]:
        assert values["first_bug"]["type"] == "LaunchError" and values["first_bug"]["from"] == 0
        assert values["first_bug"]["message"].startswith("rank 0 failed with ZeroDivisionError: oh")


def test_an_action_on_all_ranks_fails_on_all_if_it_fails_on_one(recorded):
    assert [values["each"] for values in recorded] == [result(0), result(10), result(20)]
    forwarded = error("StorageError", "rank 1: disk full", 1)
    assert [values["each_refused"] for values in recorded] == [forwarded, error("StorageError", "disk full"), forwarded]
    assert recorded[2]["each_bug"] == error("KeyError", "'x'")
    for values in recorded[:2]:
        assert values["each_bug"]["type"] == "LaunchError" and values["each_bug"]["from"] == 2
        assert values["each_bug"]["message"].startswith("rank 2 failed with KeyError: 'x'")
    assert recorded[0]["each_two"] == error("DataError", "rank 1: shard 1 (ranks 1-2 failed)", 1)
    assert [values["each_two"] for values in recorded[1:]] == [
        error("DataError", "shard 1"),
        error("DataError", "shard 2"),
    ]


def test_every_rank_gets_the_maximum_after_the_same_step(recorded):
    assert [values["votes"] for values in recorded] == [[0, 15, 0]] * 3
    assert [values["between"] for values in recorded] == [[0, 1, 2]] * 3, "other collectives between start and result"
    assert [values["last_vote"] for values in recorded] == [2] * 3


def test_every_rank_reports_the_differences_between_ranks(recorded):
    for values in recorded:
        assert values["same"] == result(None)
        assert values["other_recipe"]["type"] == "LaunchError"
        assert values["other_recipe"]["message"].startswith(
            f"{DISAGREE}  recipe: batch.micro_batch is 4 on ranks 0-1, 8 on rank 2\nStart"
        )
        assert values["other_code_and_data"]["message"].startswith(
            f'{DISAGREE}  code: source is "bad" on rank 0, "f00" on ranks 1-2\n'
            '  code: torch is "2.11" on rank 0, not set on ranks 1-2\n'
            "  data: tokens is 0 on rank 0, 1 on rank 1, 2 on rank 2\nStart"
        )


def test_each_rank_has_its_own_log_and_only_rank_0_prints(scenario):
    folder, done = scenario
    logs = [(folder / f"run/logs/rank-0000{rank}.log").read_text() for rank in range(3)]
    for rank, log in enumerate(logs):
        header = (
            rf"==== \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 rank {rank} of 3, pid \d+ on \S+: "
            r".*worker.py collectives .*\n"
        )
        assert re.match(header, log), log
        ranks_that_printed = set(re.findall(r"(?:python|warning|descriptor) of rank (\d)", log))
        assert ranks_that_printed == {str(rank)}
    for rank, log in enumerate(logs[1:], start=1):
        assert f"descriptor of rank {rank}\n" in log, "output below the level of Python is in the file too"
    assert done.stdout == "python of rank 0\n"
    assert "UserWarning: warning of rank 0\n" in done.stderr and "descriptor of rank 0\n" in done.stderr
    assert "rank 1" not in done.stderr and "rank 2" not in done.stderr


def test_the_processes_share_one_machine(recorded):
    for values in recorded:
        assert values["threads"] >= 1 and values["interface"] in ("lo", "lo0")
        assert values["session_leader"], "a terminal's signals reach the launcher only"
