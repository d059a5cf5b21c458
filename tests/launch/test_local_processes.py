"""Processes of a launcher. It ends like a single process; if one fails, the user reads the first failure once.

Each process gets each signal once, and saves.
"""

import contextlib
import os
import signal

import pytest

from hlat.launch.local_processes import RankPlaces, launch_ranks
from hlat.launch.supervision import running_ranks
from hlat.runtime.process import REQUEUE_CODE
from tests.support.launch.launching import launch, wait_for, wait_until, wait_until_gone


@pytest.fixture
def run_scenario(tmp_path, capfd):
    """Run a scenario; return its exit code, the message to the user, and all other console output."""

    def run(scenario):
        code, message = launch(scenario, tmp_path)
        printed = capfd.readouterr()
        return code, message, printed.out + printed.err

    return run


def test_a_user_error_on_one_rank(run_scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(running_ranks, "_NOTICING", 600.0)  # a busy rank may notice later that the other has ended
    code, message, console = run_scenario("refused_on_one")
    assert code == 3, "the exit code of a StorageError"
    logs = tmp_path / "run" / "logs"
    assert message == f"rank 1 failed: run.dir /full: no space left\neach rank's log: {logs}/rank-*.log"
    assert console == "", "neither the ranks nor torch elastic print it again"
    assert (logs / "rank-00001.log").read_text().endswith("error: run.dir /full: no space left\n")
    other = (logs / "rank-00000.log").read_text()
    # It was connected to rank 1, or on a busy machine not yet.
    assert "closed by peer" in other or "remote worker" in other, "the other rank's error is in its log"


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


def received(folder, rank):
    return [int(number) for number in (folder / f"received-{rank}").read_text().split()]


ENDED = ": ended before the first step; run the same command again\n"  # these processes report no steps
SAID = {signal.SIGTERM: f"SIGTERM{ENDED}", signal.SIGUSR1: f"SIGUSR1{ENDED}", signal.SIGINT: ""}
EXIT_CODES = {signal.SIGTERM: REQUEUE_CODE, signal.SIGUSR1: REQUEUE_CODE, signal.SIGINT: 130}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_process_group_saves_and_stops_once(stepping, tmp_path, number):
    # To the process group, as a terminal sends Ctrl-C.
    launcher = stepping()
    os.killpg(launcher.pid, number)
    out, err = launcher.communicate()
    assert (launcher.returncode, out, err) == (EXIT_CODES[number], "", SAID[number])
    for rank in range(2):
        assert received(tmp_path, rank) == [number]
        assert (tmp_path / f"saved-{rank}").exists()


def test_a_second_signal_ends_at_once(stepping, tmp_path):
    launcher = stepping(SAVE_SECONDS="100000")
    launcher.send_signal(signal.SIGTERM)
    wait_for(*(tmp_path / f"saving-{rank}" for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate()
    assert launcher.returncode == 128 + signal.SIGINT, err
    for rank in range(2):
        assert received(tmp_path, rank) == [signal.SIGTERM, signal.SIGINT]
        assert not (tmp_path / f"saved-{rank}").exists()


def test_a_signal_to_a_single_rank_stops_all(stepping, tmp_path):
    launcher = stepping()
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    out, err = launcher.communicate()
    assert (launcher.returncode, out, err) == (REQUEUE_CODE, "", f"a signal to one process{ENDED}")
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert not (tmp_path / "received-0").exists(), "rank 0 learned of it from the maximum over ranks"


def test_a_killed_launcher_leaves_no_process_behind(stepping, tmp_path):
    launcher = stepping(TMPDIR=str(tmp_path))  # a killed launcher cannot clean up
    launcher.kill()
    for rank in range(2):
        wait_until_gone(int((tmp_path / f"pid-{rank}").read_text()))
        assert (tmp_path / f"saved-{rank}").exists()
    # Each rank polls its launcher: one may learn from the other, and end, before it polls.
    signals_by_rank = [received(tmp_path, rank) for rank in range(2) if (tmp_path / f"received-{rank}").exists()]
    assert signals_by_rank and all(signals == [signal.SIGTERM] for signals in signals_by_rank)


def test_ranks_have_their_variables_and_none_outlives_its_launcher(tmp_path):
    shown: list[str] = []
    command = ["sh", "-c", "echo $RANK of $WORLD_SIZE $A; exec sleep 100000"]
    places = RankPlaces(first=2, nproc=2, world=4, node=1, address="10.0.0.1", port=7)
    with launch_ranks(command, places, {"A": "b"}, tmp_path, shown.append) as ranks:
        wait_until(lambda: len(shown) == 2)
        assert [ranks.poll(rank) for rank in (2, 3)] == [None, None]
        assert {os.getsid(pid) for pid in ranks.pids.values()} == set(ranks.pids.values())
    assert sorted(shown) == ["2 of 4 b", "3 of 4 b"]
    assert [ranks.poll(rank) for rank in (2, 3)] == [-signal.SIGKILL, -signal.SIGKILL]


def test_ranks_may_save_after_an_error_of_their_supervisor(tmp_path):
    shown: list[str] = []
    command = ["sh", "-c", "trap 'touch saved-$RANK; exit 7' TERM; echo up; while :; do sleep 0.05; done"]
    places = RankPlaces(first=0, nproc=2, world=2, node=0, address="10.0.0.1", port=7)
    with (
        pytest.raises(ZeroDivisionError),
        contextlib.chdir(tmp_path),
        launch_ranks(command, places, {}, tmp_path, shown.append) as ranks,
    ):
        wait_until(lambda: len(shown) == 2)
        raise ZeroDivisionError
    assert [ranks.poll(rank) for rank in (0, 1)] == [7, 7]
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))
