"""Three real processes of one run: what they tell each other, what they refuse together, and what they print where."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.launch.launching import ROOT

REFUSED = "recipe: 1 problem\n  model.heads = 9: too many take 4"
DISAGREE = "the processes of this run were started differently:\n"


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """The scenario ``talk`` run once, through the launcher as a command: (folder, what it printed)."""
    folder = tmp_path_factory.mktemp("talk")
    command = [sys.executable, "-m", "tests.support.launch.launcher", "3", "talk", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def seen(talk):
    """What each rank wrote down."""
    return [json.loads((talk[0] / f"seen-{rank}.json").read_text()) for rank in range(3)]


def result(value):
    return {"result": value}


def error(kind, message, rank=None):
    return {"type": kind, "message": message, "from": rank}


def test_values_reach_the_ranks_they_are_for(seen):
    for rank, saw in enumerate(seen):
        assert saw["world"] == 3 and saw["is_first"] == (rank == 0)
        assert saw["broadcast"] == {"from": 0}
        assert saw["gather"] == ([0, 1, 4] if rank == 0 else None)
        assert saw["all_gather"] == [[], [1], [2, 2]]
        assert saw["all_reduce"] == 6.0


def test_what_rank_0_does_alone_is_every_ranks_result_or_error(seen):
    for rank, saw in enumerate(seen):
        origin = None if rank == 0 else 0
        assert saw["first"] == result({"asked": 0})
        assert saw["first_refused"] == error("RecipeError", REFUSED, origin)
        assert saw["problems"] == ["model.heads"], "the typed error arrives whole, not only its message"
    assert seen[0]["first_bug"] == error("ZeroDivisionError", "oh")
    for saw in seen[1:]:
        assert saw["first_bug"]["type"] == "LaunchError" and saw["first_bug"]["from"] == 0
        assert saw["first_bug"]["message"].startswith("rank 0 failed with ZeroDivisionError: oh")


def test_what_each_rank_does_fails_on_all_if_it_fails_on_one(seen):
    assert [saw["each"] for saw in seen] == [result(0), result(10), result(20)]
    told = error("StorageError", "rank 1: disk full", 1)
    assert [saw["each_refused"] for saw in seen] == [told, error("StorageError", "disk full"), told]
    assert seen[2]["each_bug"] == error("KeyError", "'x'")
    for saw in seen[:2]:
        assert saw["each_bug"]["type"] == "LaunchError" and saw["each_bug"]["from"] == 2
        assert saw["each_bug"]["message"].startswith("rank 2 failed with KeyError: 'x'")
    assert seen[0]["each_two"] == error("DataError", "rank 1: shard 1 (ranks 1-2 failed)", 1)
    assert [saw["each_two"] for saw in seen[1:]] == [error("DataError", "shard 1"), error("DataError", "shard 2")]


def test_one_ranks_vote_is_every_ranks_result_after_the_same_step(seen):
    assert [saw["votes"] for saw in seen] == [[0, 15, 0]] * 3
    assert [saw["between"] for saw in seen] == [[0, 1, 2]] * 3, "talk between casting and counting"
    assert [saw["last_vote"] for saw in seen] == [2] * 3


def test_ranks_that_would_do_different_things_all_say_which(seen):
    for saw in seen:
        assert saw["same"] == result(None)
        assert saw["other_recipe"]["type"] == "LaunchError"
        assert saw["other_recipe"]["message"].startswith(
            f"{DISAGREE}  recipe: batch.micro_batch is 4 on ranks 0-1, 8 on rank 2\nStart"
        )
        assert saw["other_code_and_data"]["message"].startswith(
            f'{DISAGREE}  code: source is "bad" on rank 0, "f00" on ranks 1-2\n'
            '  code: torch is "2.11" on rank 0, not set on ranks 1-2\n'
            "  data: tokens is 0 on rank 0, 1 on rank 1, 2 on rank 2\nStart"
        )


def test_each_rank_has_its_own_log_and_rank_0_the_console(talk):
    folder, done = talk
    logs = [(folder / f"run/logs/rank-0000{rank}.log").read_text() for rank in range(3)]
    for rank, log in enumerate(logs):
        header = (
            rf"==== \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 rank {rank} of 3, pid \d+ on \S+: .*worker.py talk .*\n"
        )
        assert re.match(header, log), log
        ranks_that_printed = set(re.findall(r"(?:python|warning|descriptor) of rank (\d)", log))
        assert ranks_that_printed == {str(rank)}
    for rank, log in enumerate(logs[1:], start=1):
        assert f"descriptor of rank {rank}\n" in log, "what is printed below Python is in the file too"
    assert done.stdout == "python of rank 0\n"
    assert "UserWarning: warning of rank 0\n" in done.stderr and "descriptor of rank 0\n" in done.stderr
    assert "rank 1" not in done.stderr and "rank 2" not in done.stderr


def test_the_processes_share_the_machine(seen):
    for saw in seen:
        assert saw["threads"] >= 1 and saw["interface"] in ("lo", "lo0")
        assert saw["session_leader"], "a terminal's signals reach the launcher only"
