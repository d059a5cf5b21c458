"""A dump of stacks is taken for whole when its last line is there, however slowly it is written."""

import os
import sys
from subprocess import PIPE, Popen

import pytest

from hlat.resilience import STACKS_SIGNAL, has_stacks, main_thread_stack, read_stacks
from tests.support.launch.launching import wait_until

RANK = """
import sys, threading, time
from pathlib import Path
from hlat.resilience import running_heartbeat

def deeper(levels):
    deeper(levels - 1) if levels else print("ready", flush=True) or sys.stdin.read()

with running_heartbeat(3, Path(sys.argv[1])):
    for _ in range(5):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    deeper(int(sys.argv[2]))
"""


@pytest.fixture
def rank(tmp_path):
    """Start rank 3 with six threads; its main thread waits below this many calls."""
    started = []

    def start(levels: int) -> "Popen[str]":
        process = Popen([sys.executable, "-c", RANK, str(tmp_path), str(levels)], stdin=PIPE, stdout=PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("levels", [3, 200])
def test_a_dump_is_whole_with_its_last_line_and_not_before(rank, tmp_path, levels):
    process = rank(levels)
    assert not has_stacks(tmp_path, 3)
    os.kill(process.pid, STACKS_SIGNAL)
    wait_until(lambda: has_stacks(tmp_path, 3))
    whole = read_stacks(tmp_path, 3)
    assert whole.count("hread 0x") == 7, "the sampling thread, five that sleep, and the main thread"
    assert main_thread_stack(whole).count("in deeper") == (levels + 1 if levels < 100 else 100)
    path = next(tmp_path.glob("*.stacks"))
    for length in range(len(whole)):  # as if the rank had come so far
        path.write_text(whole[:length])
        assert not has_stacks(tmp_path, 3), whole[:length][-200:]


def test_a_rank_that_has_written_nothing_has_no_stacks(tmp_path):
    assert not has_stacks(tmp_path, 3)
    assert read_stacks(tmp_path, 3) == ""
