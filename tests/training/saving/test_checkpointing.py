"""Checkpointing: background and blocking saves are equal; a disk that fails for a while changes nothing else."""

import io
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve, verify_checkpoint
from hlat.config import load_recipe
from hlat.training import run
from tests.support.commands import StartedCommand
from tests.support.held import slow_disks_wait_for
from tests.support.launch.launching import wait_until

FAULT = "faults=[{{kind: {kind}, at_step: {at_step}, steps: {steps}, seconds: {seconds}}}]"


WORDS = {"enospc": "No space left on device", "eio": "Input/output error", "unavailable": ""}


def fault(kind, at_step, steps=1, seconds=1.0):
    return [FAULT.format(kind=kind, at_step=at_step, steps=steps, seconds=seconds), "--allow-faults"]


def events_of(run_dir, *kinds):
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] in kinds]


def checkpoints_of(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def steps(*numbers):
    return [f"step-{number:08d}" for number in numbers]


def assert_same(one, other):
    left, right = open_checkpoint(one).load(""), open_checkpoint(other).load("")
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_a_run_of_one_step_is_saved_too(cli, recipe_file, quick, tmp_path):
    """Also a resumed run whose last step is its first: the save at the end is its first save, by its own process."""
    short = ["training.steps=2", "schedule.warmup_steps=1"]
    for arguments in (["training.stop_after=1"], []):
        done = cli("train", recipe_file, *quick, *short, *arguments)
        assert done.returncode == 0, done.stderr
    (folder,) = [argument.partition("=")[2] for argument in quick if argument.startswith("run.dir=")]
    assert checkpoints_of(Path(folder)) == steps(1, 2)
    assert not events_of(Path(folder), "incident", "restart")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param([], id="alone", marks=pytest.mark.slow),
        pytest.param(["data.mode=online", "data.streams=8", "precision.mode=bf16-sr"], id="online"),
        pytest.param(["--nproc", "2"], id="two ranks"),
    ],
)
def test_background_and_blocking_saves_give_the_same_checkpoints(cli, recipe_file, tiny, tmp_path, change):
    every = ["checkpoint.every_steps=3", "checkpoint.keep_last=99", "training.steps=20"]
    for name, background in (("beside", "true"), ("not", "false")):
        run = [f"run.dir={tmp_path / name}", f"checkpoint.background={background}"]
        done = cli("train", recipe_file, *tiny, *every, *run, *change)
        assert done.returncode == 0, done.stderr
    expected = steps(*range(3, 20, 3), 20)
    assert checkpoints_of(tmp_path / "beside") == checkpoints_of(tmp_path / "not") == expected
    for name in expected:
        assert_same(tmp_path / "beside" / "checkpoints" / name, tmp_path / "not" / "checkpoints" / name)
    for name in ("beside", "not"):
        events = events_of(tmp_path / name, "checkpoint", "end")
        assert [event["step"] for event in events] == [*range(3, 20, 3), 20, 20]
        # The last save of a small run is written by the ranks themselves: training waits for all of it.
        assert events[-2]["stall_seconds"] == events[-2]["seconds"]
        for event in events[:-1]:
            assert event["path"].endswith(f"step-{event['step']:08d}") and event["tries"] == 1
            assert event["seconds"] > 0 and event["stall_seconds"] >= event["waited_seconds"] >= 0


@pytest.fixture
def good(finished):
    """Last checkpoint of a run whose disk never fails."""
    return resolve(finished)


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize(
    "kind", ["enospc", pytest.param("eio", marks=pytest.mark.slow), pytest.param("unavailable", marks=pytest.mark.slow)]
)
def test_several_failed_saves_do_not_change_the_run(cli, recipe_file, quick, tmp_path, good, kind, background):
    """Each is retried once, with an event; the next save is complete, and the final state is that of a good disk."""
    change = [f"checkpoint.background={background}", "checkpoint.retries=1", "checkpoint.keep_last=9"]
    run = [f"run.dir={tmp_path / 'bad'}", "checkpoint.every_steps=5", *change]
    done = cli("train", recipe_file, *quick, *run, *fault(kind, 10, steps=3))
    assert done.returncode == 0, done.stderr
    failed = events_of(tmp_path / "bad", "checkpoint_failed")
    assert [(event["step"], event["tries"]) for event in failed] == [(10, 2), (15, 2), (20, 2)]
    retries = events_of(tmp_path / "bad", "checkpoint_retry")
    assert [(event["step"], event["tries"]) for event in retries] == [(10, 1), (15, 1), (20, 1)]
    assert all(WORDS[kind] in event["message"] for event in retries)
    assert all("What would work" in event["message"] for event in failed)
    assert done.stdout.count("failed, training continues") == 3
    assert checkpoints_of(tmp_path / "bad") == steps(5, 25, 30, 35, 40)
    assert all(verify_checkpoint(path) == [] for path in (tmp_path / "bad" / "checkpoints").iterdir())
    assert_same(resolve(tmp_path / "bad"), good)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["checkpoint.background=true"], id="beside"),
        pytest.param(["checkpoint.background=false"], id="not"),
        pytest.param(["--nproc", "2"], id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_too_many_failed_saves_in_a_row_end_the_run(cli, recipe_file, quick, tmp_path, change):
    """Two failures, a success, then three: the limit counts failures in a row."""
    faults = "faults=[{kind: enospc, at_step: 2, steps: 2}, {kind: enospc, at_step: 8, steps: 99}]"
    run = ["checkpoint.every_steps=2", "checkpoint.retries=0", "checkpoint.failures=3", "recovery.restarts=0", *change]
    done = cli("train", recipe_file, *quick, *run, faults, "--allow-faults")
    assert done.returncode == 3, done.stderr
    assert "3 saves in a row have failed" in done.stderr and "of step 12" in done.stderr
    assert "step-00000006" in done.stderr and "Traceback" not in done.stderr
    failed = events_of(tmp_path / "run", "checkpoint_failed")
    assert [event["step"] for event in failed] == [2, 4, 8, 10, 12]
    again = cli("train", recipe_file, *quick, *change, "training.stop_after=1")
    assert again.returncode == 0 and "resumed at step 6 of 40" in again.stdout, again.stderr


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_failed_last_save_is_an_error(cli, recipe_file, quick, tmp_path, background):
    change = [f"checkpoint.background={background}", "checkpoint.retries=0", "recovery.restarts=0", "training.steps=20"]
    done = cli("train", recipe_file, *quick, *change, *fault("enospc", 20))
    assert done.returncode == 3 and "cannot save the checkpoint step-00000020" in done.stderr, done.stderr
    assert checkpoints_of(tmp_path / "run") == steps(10)
    again = cli("train", recipe_file, *quick, *change)
    assert again.returncode == 0 and "resumed at step 10" in again.stdout, again.stderr


def start(recipe_file, quick, tmp_path, *more, prepare=None):
    """Start the command; its output goes to a file."""
    with (tmp_path / "said").open("w") as said:
        return StartedCommand("train", recipe_file, *quick, *more, output=said, prepare=prepare)


def savers_of(process):
    """Return the saver processes of a supervised command, in the order of ranks."""
    return [rank.children()[0] for rank in psutil.Process(process.pid).children()]


def test_a_second_signal_ends_the_wait_for_the_last_save_but_not_the_save(recipe_file, quick, tmp_path):
    """The disk answers after the end of the run alone: the save does not end before the second signal."""
    # 17 M parameters: a smaller run writes its last checkpoint itself.
    large = ["model.layers=1", "model.intermediate_size=180000", "batch.global_batch=1", "batch.micro_batch=1"]
    endless = ["checkpoint.every_steps=1000000", "training.steps=1000000", "training.log_every=1", *large]
    # Without a supervisor, which would end the savers too at the second signal.
    endless += ["--no-supervisor", *fault("slow_disk", 1)]
    process = start(recipe_file, quick, tmp_path, *endless, prepare=partial(slow_disks_wait_for, tmp_path / "go"))
    wait_until(lambda: "step 1/" in (tmp_path / "said").read_text())
    [saver] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: list(tmp_path.glob("run/checkpoints/.staging-step-*")))
    time.sleep(1.1)  # a signal within a second of the first counts as the same request
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130, (tmp_path / "said").read_text()
    assert not list(tmp_path.glob("run/checkpoints/step-*")), "nobody waited for it"
    (tmp_path / "go").touch()
    wait_until(lambda: not saver.is_running())
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    assert verify_checkpoint(checkpoint) == []


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_the_loss_of_a_saver_the_rank_saves_itself(recipe_file, quick, tmp_path, cli, finished, nproc):
    every = ["checkpoint.every_steps=5", "checkpoint.keep_last=99", "training.log_every=1", "--nproc", str(nproc)]
    hold = partial(slow_disks_wait_for, tmp_path / "go")
    process = start(recipe_file, quick, tmp_path, *every, *fault("slow_disk", 5), prepare=hold)
    wait_until(lambda: list(tmp_path.glob("run/checkpoints/.staging-step-00000005-*")))
    savers_of(process)[-1].kill()
    (tmp_path / "go").touch()
    assert process.wait() == 0, (tmp_path / "said").read_text()
    lost = events_of(tmp_path / "run", "saver_lost")
    assert nproc - 1 in [event["rank"] for event in lost]
    assert "written by the ranks themselves from here on" in (tmp_path / "said").read_text()
    assert checkpoints_of(tmp_path / "run") == steps(*range(5, 41, 5))
    if nproc == 1:
        good = finished
    else:
        good = tmp_path / "good"
        assert cli("train", recipe_file, *quick, *every, f"run.dir={good}").returncode == 0
    assert_same(resolve(tmp_path / "run"), resolve(good))


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_saves_longer_than_their_interval_and_hang_seconds_are_no_hang(cli, recipe_file, quick, tmp_path, nproc):
    """Each file takes longer than hang_seconds, and each save many times its interval."""
    run = ["training.steps=20", "checkpoint.every_steps=10", "recovery.hang_seconds=5", "--nproc", str(nproc)]
    done = cli("train", recipe_file, *quick, *run, *fault("slow_disk", 1, steps=99, seconds=7))
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in events_of(tmp_path / "run", "checkpoint")] == [10, 20]
    assert not any(events_of(tmp_path / "run", kind) for kind in ("hang", "restart", "saver_lost"))
    assert events_of(tmp_path / "run", "storage_slow"), "the user is told why training waits"


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_while_a_save_is_waited_for_loses_nothing(recipe_file, quick, tmp_path, nproc):
    run = ["checkpoint.every_steps=5", "recovery.hang_seconds=5", "training.log_every=1", "--nproc", str(nproc)]
    process = start(recipe_file, quick, tmp_path, *run, *fault("slow_disk", 1, steps=99, seconds=7))
    wait_until(lambda: "step 9/" in (tmp_path / "said").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, (tmp_path / "said").read_text()
    [end] = events_of(tmp_path / "run", "end")
    assert checkpoints_of(tmp_path / "run")[-1:] == steps(end["step"]) and end["reason"] == "SIGTERM"


def test_a_run_in_this_process_leaves_no_copy_of_its_state(quick, recipe_file):
    """A copy that the saver and the run share lives as long as a descriptor of it."""
    recipe = load_recipe(str(recipe_file), [*quick, "training.steps=8", "checkpoint.every_steps=2"])
    assert recipe.checkpoint.background
    run(recipe, stream=io.StringIO())
    assert not [link for link in Path("/proc/self/fd").iterdir() if "memfd:hlat" in os.path.realpath(link)]
