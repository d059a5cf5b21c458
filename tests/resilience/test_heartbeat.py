"""Heartbeats: the supervisor reads what a rank has written, at any time."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from hlat.resilience import HEARTBEAT_FOLDER, read_heartbeat, record_durable_step, running_heartbeat
from hlat.resilience.heartbeat import Heartbeat, find_location, heartbeat_path, is_waiting
from hlat.runtime.distributed.host_collectives import call_interruptibly
from hlat.runtime.progress import current_phase, enter_phase


class Clock:
    """Clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def rank(tmp_path):
    """A heartbeat with its clock, and a function that reads it as the supervisor does."""
    clock, done = Clock(), [4]
    beat = Heartbeat(heartbeat_path(tmp_path, 3), clock)
    beat.set_step_counter(lambda: done[0])

    def go(phase, seconds):
        beat(phase)
        clock.now += seconds

    return SimpleNamespace(beat=beat, go=go, clock=clock, done=done, read=lambda: read_heartbeat(tmp_path, 3))


def test_before_the_first_step_the_step_fields_are_none(rank):
    found = rank.read()
    assert (found.rank, found.pid, found.phase, found.start_step) == (3, os.getpid(), current_phase(), None)
    assert found.first_step_at is None and found.durable_step is None and found.saver is None and found.seconds == {}


def test_phases_are_counted_from_the_first_step_on(rank):
    rank.go("evaluation", 50.0)  # before the first step: counts as start
    for data, forward in ((0.5, 2.0), (0.25, 3.0)):
        rank.go("data", data)
        rank.go("forward", forward)
        rank.go("optimizer", 0.125)
    found = rank.read()
    assert (found.start_step, found.first_step_at, found.step, found.phase) == (4, 150.0, 4, "optimizer")
    assert found.seconds == {"data": 0.75, "forward": 5.0, "optimizer": 0.125}, "the current phase has not ended"
    assert found.longest == {"data": 0.5, "forward": 3.0, "optimizer": 0.125}
    assert found.since == rank.clock.now - 0.125 and found.productive == 5.125 and found.current_step == 5


def test_a_durable_step_is_recorded_with_the_productive_seconds_up_to_it(rank):
    rank.go("data", 1.0)
    rank.go("forward", 2.0)
    rank.done[0] = 5
    rank.go("checkpoint", 9.0)  # the save of step 5, written in the background
    rank.go("data", 1.0)
    rank.go("forward", 4.0)
    rank.done[0] = 6
    rank.go("between", 1.0)
    assert rank.read().durable_step is None
    rank.beat.record_durable_step(5)
    found = rank.read()
    assert (found.durable_step, found.durable_seconds, found.productive) == (5, 2.0, 6.0)


def test_the_heartbeat_of_a_rank_killed_while_writing_can_be_read(rank):
    rank.go("forward", 1.0)
    rank.beat.content.version += 1  # odd: as if between the two halves of a change
    assert rank.read().phase == "forward"


def test_a_rank_without_a_supervisor_writes_no_heartbeat(tmp_path, monkeypatch):
    for folder in (None, str(tmp_path / "gone")):
        monkeypatch.delenv(HEARTBEAT_FOLDER, raising=False)
        if folder is not None:
            monkeypatch.setenv(HEARTBEAT_FOLDER, folder)
        with running_heartbeat(0) as beat:
            assert beat is None
            record_durable_step(3)
    assert read_heartbeat(tmp_path, 0) is None and list(tmp_path.iterdir()) == []


def test_a_supervised_process_records_phases_and_that_it_is_alive(tmp_path):
    work = (
        "import time\n"
        "from hlat.resilience import (\n"
        "  read_heartbeat, record_durable_step, record_saver, running_heartbeat, set_step_counter)\n"
        "from hlat.runtime.progress import enter_phase\n"
        "with running_heartbeat(1) as beat:\n"
        "  set_step_counter(lambda: 7)\n  enter_phase('data'); enter_phase('forward')\n"
        "  record_durable_step(7)\n  record_saver(99)\n"
        "  while True:\n"
        "    found = read_heartbeat(beat.saver_path.parent, 1)\n"
        "    if found.alive_at > found.since and 'forward' in found.busy: break\n"
        "    time.sleep(0.01)\n"
    )
    environment = {**os.environ, HEARTBEAT_FOLDER: str(tmp_path)}
    subprocess.run([sys.executable, "-c", work], env=environment, check=True, timeout=300)
    found = read_heartbeat(tmp_path, 1)
    assert (found.start_step, found.durable_step, found.phase, found.waiting) == (7, 7, "forward", False)
    assert found.saver == 99
    assert found.alive_at > found.since and found.busy["forward"] > 0


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/x/torch/distributed/distributed_c10d.py", True),
        ("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", True),
        ("/x/torch/distributed/tensor/_dispatch.py", False),
        ("/x/torch/nn/functional.py", False),
        ("/x/hlat/runtime/distributed/host_collectives.py", True),
        ("/x/hlat/parallel/parallel_model.py", False),
    ],
)
def test_waiting_for_other_ranks_is_recognized_from_the_innermost_frame(file, waits):
    def frame(name, line, function, back=None):
        return SimpleNamespace(f_code=SimpleNamespace(co_filename=name, co_name=function), f_lineno=line, f_back=back)

    outer = frame("/x/hlat/training/loop.py", 36, "accumulate_gradients", frame("/x/hlat/training/loop.py", 9, "run"))
    inner = frame(file, 5, "inner", outer)
    assert is_waiting(inner) is waits
    own = "parallel/parallel_model.py:5 inner"
    assert find_location(inner) == (
        own if own.partition(":")[0] in file else "training/loop.py:36 accumulate_gradients"
    )


def test_a_thread_in_an_interruptible_call_is_waiting():
    """The call that it waits for inspects its frame, as the sampling thread does."""
    seen = []

    def call():
        deadline = time.monotonic() + 60
        while not seen or not (seen[-1][0] or time.monotonic() > deadline):  # until the main thread is waiting
            frame = sys._current_frames()[threading.main_thread().ident]
            seen.append((is_waiting(frame), find_location(frame)))

    call_interruptibly(call)
    waits, location = seen[-1]
    assert waits and "host_collectives.py" not in location


def test_phases_are_recorded_in_the_heartbeat_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv(HEARTBEAT_FOLDER, str(tmp_path))
    before = current_phase()
    with running_heartbeat(0):
        enter_phase("reduce")
        assert read_heartbeat(tmp_path, 0).phase == "reduce"
        enter_phase(before)
    enter_phase("optimizer")
    assert read_heartbeat(tmp_path, 0).phase == before, "no phase is recorded after the block"
    enter_phase(before)
