"""Invisible resume: an interrupted and resumed run equals the uninterrupted one, bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.training.start import run_lock
from tests.support.commands import StartedCommand

TIMINGS = {"tokens_per_second", "mfu", "mfu_full", "memory_bytes", "seconds"}


def final_state(run_dir):
    checkpoint = open_checkpoint(resolve(run_dir))
    return checkpoint.load(""), checkpoint.meta


def model_of(run_dir):
    """Return all final weights as one vector."""
    weights = open_checkpoint(resolve(run_dir)).load("model.")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def metrics_of(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def assert_same_run(one, other):
    (tensors, meta), (other_tensors, other_meta) = final_state(one), final_state(other)
    assert tensors.keys() == other_tensors.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in tensors)
    assert any(name.startswith("rng.") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name
    assert (meta["step"], meta["samples"], meta["tokens"]) == (
        other_meta["step"],
        other_meta["samples"],
        other_meta["tokens"],
    )
    assert metrics_of(one) == metrics_of(other)


@pytest.fixture(scope="module")
def uninterrupted(cli, tiny_recipe, corpus, tmp_path_factory):
    """An uninterrupted run, made once; tests must not change its folder."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    done = cli("train", folder / "recipe.yaml", f"data.path={corpus}", f"run.dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def straight(uninterrupted, tmp_path):
    """Copy of that run."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "straight"))


def test_a_run_stopped_after_17_of_40_steps_resumes_bitwise(cli, recipe_file, tiny, straight, tmp_path):
    first = cli("train", recipe_file, *tiny, "training.stop_after=17")
    assert first.returncode == 0 and "stopped at step 17 of 40" in first.stdout, first.stderr
    second = cli("train", recipe_file, *tiny)
    assert second.returncode == 0 and "resumed at step 17" in second.stdout, second.stderr
    assert_same_run(straight, tmp_path / "run")
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    assert steps == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [line["samples"] for line in metrics_of(tmp_path / "run")] == [8 * step for step in steps]


def test_a_run_interrupted_by_ctrl_c_saves_and_resumes(recipe_file, tiny, straight, tmp_path, cli):
    process = StartedCommand("train", recipe_file, *tiny)
    for line in process.stdout:
        if "step 5/40" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGINT, rest
    assert "the same command goes on" in rest and "Traceback" not in rest
    assert cli("train", recipe_file, *tiny).returncode == 0
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.slow  # slow: tests/faults has kills in the default suite
def test_a_run_killed_at_random_times_resumes_bitwise(recipe_file, tiny, straight, tmp_path):
    rng = random.Random(11)
    command = [sys.executable, "-m", "hlat", "train", str(recipe_file), *tiny, "checkpoint.every_steps=3"]
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
        seen = ""
        for line in process.stdout:
            seen += line
            if line.startswith("run: "):  # training begins: the kill may hit anything from here on, also a save
                break
        time.sleep(rng.uniform(0.0, 1.0))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.slow  # slow: tests/optim and tests/distributed resume Muon in the default suite
def test_a_run_of_muon_killed_at_a_random_time_resumes_bitwise(cli, recipe_file, tiny, corpus, tmp_path):
    muon = [*tiny, "optimizer.kind=muon", "checkpoint.every_steps=3"]
    assert cli("train", recipe_file, *muon, f"run.dir={tmp_path / 'straight'}").returncode == 0
    command = [sys.executable, "-m", "hlat", "train", str(recipe_file), *muon]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    for line in process.stdout:
        if line.startswith("run: "):
            break
    time.sleep(random.Random(12).uniform(0.3, 1.0))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert cli("train", recipe_file, *muon).returncode == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run")
    names = final_state(tmp_path / "run")[0]
    assert any(name.startswith("optimizer.momentum.") for name in names)


def test_a_run_resumes_from_the_required_step_or_fails(cli, recipe_file, tiny, straight):
    here = f"run.dir={straight}"
    before = {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")}
    refused = cli("train", recipe_file, *tiny, here, "training.steps=45", "--require-step", "30")
    assert refused.returncode == 2 and "the newest checkpoint is not of step 30" in refused.stderr, refused.stderr
    assert {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")} == before
    done = cli("train", recipe_file, *tiny, here, "training.steps=45", "--require-step", "40")
    assert done.returncode == 0 and "resumed at step 40 of 45" in done.stdout, done.stderr
    (straight / "checkpoints" / "step-00000045" / "COMMITTED").unlink()
    refused = cli("train", recipe_file, *tiny, here, "training.steps=45", "--require-step", "40", "--nproc", "2")
    assert refused.returncode == 2 and "step-00000045: COMMITTED is missing" in refused.stderr, refused.stderr


def test_only_the_first_attempt_checks_the_required_step(cli, recipe_file, tiny, straight):
    """A fault after the next checkpoint: the second attempt resumes from that newer checkpoint."""
    here = [f"run.dir={straight}", "training.steps=55", "recovery.backoff_seconds=0", "--require-step", "40"]
    done = cli("train", recipe_file, *tiny, *here, "faults=[{kind: kill, at_step: 53}]", "--allow-faults")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 40 of 55" in done.stdout and "resumed at step 50 of 55" in done.stdout


def test_a_finished_run_has_nothing_to_do(cli, recipe_file, tiny, straight):
    before = (straight / "metrics.jsonl").read_bytes()
    again = cli("train", recipe_file, *tiny, f"run.dir={straight}")
    assert again.returncode == 0 and "finished at step 40" in again.stdout, again.stderr
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_coalescing_may_change_on_resume(cli, recipe_file, tiny, straight, tmp_path):
    """Resumed with the other coalescing, final weights are as close as with another micro-batch size.

    Both change only the order of sums. The effect of such rounding differences after 23 steps is measured in the same
    test on the final weights (a loss rounded to fp32 may hide it). Coalescing may change them by at most ten times as
    much; a lost or permuted head changes them by more than a thousand times.
    """
    ends, apart = {}, {}
    expected = model_of(straight)
    for name, change in (("rounding", "batch.micro_batch=2"), ("coalescing", "model.coalesce=false")):
        here = f"run.dir={tmp_path / name}"
        assert cli("train", recipe_file, *tiny, here, "training.stop_after=17").returncode == 0
        done = cli("train", recipe_file, *tiny, here, change)
        assert done.returncode == 0, done.stderr
        pairs = zip(metrics_of(straight), metrics_of(tmp_path / name), strict=True)
        gaps = [abs(a["loss"] - b["loss"]) for a, b in pairs]
        assert gaps[:3] == [0, 0, 0], "steps 5, 10 and 15, before the change"
        ends[name] = max(gaps)
        apart[name] = float((model_of(tmp_path / name) - expected).norm() / expected.norm())
    assert 0 < apart["coalescing"] <= 10 * apart["rounding"] < 1e-4, apart
    assert ends["coalescing"] <= 10 * ends["rounding"] < 1e-3, ends
    events = [json.loads(line) for line in (tmp_path / "coalescing" / "events.jsonl").read_text().splitlines()]
    resumed = next(event for event in events if event["event"] == "resume")
    assert {"path": "model.coalesce", "old": True, "new": False} in resumed["changes"]


@pytest.mark.parametrize(
    "change", ["model.layers=3", "training.seed=4", "data.sequence_length=16", "batch.global_batch=4"]
)
def test_a_change_of_model_or_data_order_is_refused_and_nothing_is_lost(cli, recipe_file, tiny, straight, change):
    before = {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")}
    refused = cli("train", recipe_file, *tiny, f"run.dir={straight}", change)
    field = change.split("=")[0]
    assert refused.returncode == 2 and field in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
    assert {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")} == before


def test_other_changes_are_allowed_and_recorded(cli, recipe_file, tiny, straight):
    done = cli("train", recipe_file, *tiny, f"run.dir={straight}", "training.steps=42", "optimizer.lr=1e-3")
    assert done.returncode == 0 and "finished at step 42" in done.stdout, done.stderr
    events = [json.loads(line) for line in (straight / "events.jsonl").read_text().splitlines()]
    changes = {c["path"]: (c["old"], c["new"]) for e in events if e["event"] == "resume" for c in e["changes"]}
    assert changes["training.steps"] == (40, 42) and changes["optimizer.lr"] == (0.003, 0.001)


def test_two_processes_cannot_share_a_run_directory(cli, recipe_file, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    with run_lock(tmp_path / "run"):
        second = cli("train", recipe_file, *tiny)
    assert second.returncode == 2 and f"pid {os.getpid()}" in second.stderr
