"""Signals to the launcher: each process hears each signal once, saves, and the whole ends as one process would."""

import os
import signal

import pytest

from hlat.runtime.process import REQUEUE_CODE
from tests.support.launch.launching import wait_for, wait_until_gone


def received(folder, rank):
    return [int(number) for number in (folder / f"received-{rank}").read_text().split()]


ENDS = {signal.SIGTERM: REQUEUE_CODE, signal.SIGUSR1: REQUEUE_CODE, signal.SIGINT: 130}


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_a_signal_to_the_process_group_saves_and_stops_once(stepping, tmp_path, number):
    # To the whole group, as a terminal sends it on Ctrl-C.
    launcher = stepping()
    os.killpg(launcher.pid, number)
    out, err = launcher.communicate()
    assert (launcher.returncode, out, err) == (ENDS[number], "", "")
    for rank in range(2):
        assert received(tmp_path, rank) == [number]
        assert (tmp_path / f"saved-{rank}").exists()


def test_a_second_signal_ends_at_once(stepping, tmp_path):
    launcher = stepping(SAVE_SECONDS="600")
    launcher.send_signal(signal.SIGTERM)
    wait_for(*(tmp_path / f"saving-{rank}" for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate()
    assert launcher.returncode == 128 + signal.SIGINT, err
    for rank in range(2):
        assert received(tmp_path, rank) == [signal.SIGTERM, signal.SIGINT]
        assert not (tmp_path / f"saved-{rank}").exists()


def test_a_signal_that_reached_one_rank_only_stops_all(stepping, tmp_path):
    launcher = stepping()
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    out, err = launcher.communicate()
    assert (launcher.returncode, out, err) == (REQUEUE_CODE, "", "")
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert not (tmp_path / "received-0").exists(), "rank 0 learned it by vote"


def test_a_launcher_that_is_killed_outright_leaves_no_process_behind(stepping, tmp_path):
    launcher = stepping(TMPDIR=str(tmp_path))  # which it cannot clean up
    launcher.kill()
    for rank in range(2):
        wait_until_gone(int((tmp_path / f"pid-{rank}").read_text()))
        assert (tmp_path / f"saved-{rank}").exists()
    # Each looks for its launcher now and then: one may learn from the other's vote, and be done, before it looks.
    heard = [received(tmp_path, rank) for rank in range(2) if (tmp_path / f"received-{rank}").exists()]
    assert heard and all(signals == [signal.SIGTERM] for signals in heard)
