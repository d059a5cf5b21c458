"""Without hlat's supervisor, ranks end by themselves when a peer hangs or is lost, and name it."""

import json
import os
import signal
import time

import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.launch.worker_process import read_report
from tests.support.commands import StartedCommand
from tests.support.launch.ports import free_port

HANG_SECONDS = 4
WORLD = 2


@pytest.fixture
def start(corpus, tiny_recipe, tmp_path):
    """Start the ranks of a run as torchrun does; return them."""
    (tmp_path / "recipe.yaml").write_text(tiny_recipe)

    def ranks(name, *more):
        fields = [f"data.path={corpus}", f"data.prepared_dir={tmp_path / 'data'}", f"run.dir={tmp_path / name}"]
        fields += [
            "training.steps=60",
            "training.log_every=1",
            "checkpoint.every_steps=10",
            "tracking.tensorboard=false",
        ]
        fields += ["tracking.console=plain", f"recovery.hang_seconds={HANG_SECONDS}"]
        place = {"WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        started = []
        for rank in range(WORLD):
            own = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "GROUP_RANK": rank,
                "TORCHELASTIC_ERROR_FILE": tmp_path / f"{rank}.json",
            }
            environment = os.environ | {key: str(value) for key, value in (place | own).items()}
            started.append(StartedCommand("train", tmp_path / "recipe.yaml", *fields, *more, env=environment))
        return started

    return ranks


def wait_for_step(folder, step):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
        if len(lines) >= step:
            return
        time.sleep(0.02)
    raise TimeoutError(f"step {step} was not reached")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_by_the_others_which_end_and_the_run_continues_bitwise(start, tmp_path, victim):
    ends = [process.wait(180) for process in start("whole")]
    assert ends == [0, 0]
    processes = start("hung")
    wait_for_step(tmp_path / "hung", 15)
    os.kill(processes[victim].pid, signal.SIGSTOP)
    other, begun = 1 - victim, time.monotonic()
    assert processes[other].wait(60) == 1, "the exit code with which a launcher starts it again"
    # The phase exceeds its limit, a check every second notices, and reports are waited for five seconds. Ten times the
    # longest phase of these small steps may be more than the limit on a busy machine: the test asks for the order only.
    assert time.monotonic() - begun < 40
    os.kill(processes[victim].pid, signal.SIGKILL)
    processes[victim].wait(30)
    report = read_report(tmp_path / f"{other}.json")
    assert f"no sign of life from host {victim} (rank {victim})" in report.message and report.kind == "connection"
    events = [json.loads(line) for line in (tmp_path / "hung" / "events.jsonl").read_text().splitlines()]
    (hang,) = [event for event in events if event["event"] == "hang"]
    assert hang["ranks"] == [victim]
    assert [event["kind"] for event in events if event["event"] == "incident"] == ["hang"]
    assert (
        f"rank {other}, pid {processes[other].pid}"
        in next((tmp_path / "hung" / "logs").glob("hang-step-*")).read_text()
    )
    assert [process.wait(180) for process in start("hung")] == [0, 0]
    weights = [open_checkpoint(resolve(tmp_path / name)).load("") for name in ("whole", "hung")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
