"""``hlat train`` in several processes is one run with one log, and loses no data however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.runtime.process import REQUEUE_CODE
from tests.support.commands import StartedCommand
from tests.support.launch.ports import free_port

Hlat = Callable[..., "subprocess.CompletedProcess[str]"]
STEPS = 12
LAYOUT = ["--nproc", "2", "parallel.tensor=2"]


@pytest.fixture(scope="module")
def start(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Arguments of ``hlat train`` for a run folder of that name; all runs use the same prepared text."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "recipe.yaml"
    recipe.write_text(tiny_recipe)

    def arguments(name: str, *more: str) -> list[str]:
        fixed = [f"data.path={corpus}", f"data.prepared_dir={folder / 'data'}", f"run.dir={folder / name}"]
        short = [
            f"training.steps={STEPS}",
            "training.log_every=1",
            "checkpoint.every_steps=4",
            "tracking.console=plain",
        ]
        return ["train", str(recipe), *fixed, *short, "tracking.tensorboard=false", *more]

    return arguments


def run_dir(arguments: list[str]) -> Path:
    return Path(next(a for a in arguments if a.startswith("run.dir=")).removeprefix("run.dir="))


def losses(arguments: list[str]) -> list[float]:
    lines = (run_dir(arguments) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [one["step"] for one in steps] == list(range(1, len(steps) + 1)), "every step once"
    return [one["loss"] for one in steps]


def state(arguments: list[str]) -> dict[str, torch.Tensor]:
    return open_checkpoint(resolve(run_dir(arguments))).load("")


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(start: Callable[..., list[str]], cli: Hlat) -> list[str]:
    """An uninterrupted run in two processes."""
    arguments = start("whole", *LAYOUT)
    done = cli(*arguments)
    assert done.returncode == 0, done.stderr
    assert "tensor 2" in done.stdout and done.stdout.count(f"finished at step {STEPS}") == 1, done.stdout
    return arguments


def test_a_run_in_two_processes_equals_the_run_in_one(
    whole: list[str], start: Callable[..., list[str]], cli: Hlat
) -> None:
    alone = start("alone")
    assert cli(*alone).returncode == 0
    for step, (found, expected) in enumerate(zip(losses(whole), losses(alone), strict=True), start=1):
        # see comparing.py: 12 sqrt(n) u per step, with chains of fewer than 4000 additions
        assert abs(found - expected) <= 12 * 4000**0.5 * 2.0**-24 * step * expected
    logs = sorted(path.name for path in (run_dir(whole) / "logs").iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]


def test_stopping_and_resuming_in_the_same_layout_changes_no_bit(
    whole: list[str], start: Callable[..., list[str]], cli: Hlat
) -> None:
    """First the run is stopped by a signal, then rank 1 alone is killed; the supervisor restarts it."""
    arguments = start("interrupted", *LAYOUT)
    assert cli(*arguments, "training.stop_after=3").returncode == 0
    process = StartedCommand(*arguments, "training.log_every=1")
    victim = _wait_for_rank(process, run_dir(arguments), step=6)
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0 and "rank 1 was killed by SIGKILL" in output, output
    assert losses(arguments) == losses(whole)
    assert same_bits(state(arguments), state(whole))


def _wait_for_rank(process: StartedCommand, folder: Path, step: int) -> int:
    """Wait until the run has reached a step; return the process id of rank 1."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            header = (folder / "logs" / "rank-00001.log").read_text().rpartition("====")[2]
            return int(header.partition("pid ")[2].split()[0])
        time.sleep(0.02)
    raise AssertionError(f"the run did not get to step {step}")


def test_a_signal_to_the_launcher_saves_and_the_run_resumes_in_another_layout(
    whole: list[str], start: Callable[..., list[str]], cli: Hlat
) -> None:
    arguments = start("signalled", "training.steps=400")
    process = StartedCommand(*arguments, "--nproc", "2", "parallel.zero=3")
    _wait_for_rank(process, run_dir(arguments), step=2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == REQUEUE_CODE, output
    stopped = open_checkpoint(resolve(run_dir(arguments))).step
    assert stopped == len(losses(arguments)) < 400
    on = [a for a in arguments if not a.startswith("training.steps")]
    done = cli(
        *on, f"training.steps={stopped + 4}", "schedule.horizon_steps=400", "--nproc", "2", "parallel.pipeline=2"
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(arguments)) == stopped + 4


def test_the_same_command_works_under_torchrun(whole: list[str], start: Callable[..., list[str]]) -> None:
    arguments = [a for a in start("torchrun", *LAYOUT) if a not in LAYOUT[:2]]
    runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    done = subprocess.run(
        [*runner, f"--master-port={free_port()}", "-m", "hlat", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert same_bits(state(arguments), state(whole))


def test_processes_with_different_recipes_stop_with_an_error(start: Callable[..., list[str]]) -> None:
    port = str(free_port())
    processes = []
    for rank, rate in enumerate(("1e-3", "2e-3")):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        processes.append(StartedCommand(*start("different", f"optimizer.lr={rate}"), env=environment))
    ends = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "optimizer.lr is 0.001 on rank 0, 0.002 on rank 1" in ends[0][0], ends
    assert not (run_dir(start("different")) / "checkpoints").exists()
