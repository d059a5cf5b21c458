"""Invisible resume: an interrupted and resumed run equals the uninterrupted one, bit for bit.

One run with everything on is killed twice and is the witness of the default suite. Kills of runs with one of its parts
are in the slow suite: runs/test_online_runs, runs/test_ramped_runs, saving/test_tiers and
saving/test_validation_after_saving.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hlat.checkpoint import export_hf
from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.training.start import run_lock
from tests.support.checkpoint.saved_states import assert_equal
from tests.support.commands import StartedCommand
from tests.support.held import wait_for_a_stop_after
from tests.support.same_runs import assert_same_run, events_of, metrics_of, newest

# The first stage of the ramp ends with step 8; step 3 has a NaN and is skipped; steps 8 and 16 are validated.
EVERYTHING = [
    "training.steps=16",
    "training.log_every=1",
    "training.ema={decay: 0.75, every_steps: 2}",
    "data.mode=online",
    "data.streams=8",
    f"batch.ramp=[{{tokens: {8 * 4 * 32}, global_batch: 4}}]",
    "precision.mode=bf16-sr",
    "anomalies.window=8",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=9",
    "checkpoint.background=false",
    "evaluation.every_steps=8",
    "recovery.backoff_seconds=0",
    "tracking.tensorboard=false",
    "--allow-faults",
]
A_NAN = "{kind: nan, at_step: 3}"
KILLS = "{kind: kill, at_step: 7, phase: backward}, {kind: kill, at_step: 8, phase: evaluation}"


def model_of(run_dir):
    """Return all final weights as one vector."""
    weights = open_checkpoint(resolve(run_dir)).load("model.")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def test_a_run_with_everything_on_is_killed_twice_and_ends_with_the_same_bits(cli, recipe_file, tiny, tmp_path):
    """Within a stage of the ramp it goes on from a snapshot; after the stage, in validation, from its checkpoint.

    Only the killed run has snapshots and exports, which change no bit either.
    """
    straight, run = tmp_path / "straight", tmp_path / "run"
    faults = f"faults=[{A_NAN}]"
    plain = cli("train", recipe_file, *tiny, *EVERYTHING, f"run.dir={straight}", faults)
    assert plain.returncode == 0, plain.stderr
    more = [
        f"checkpoint.local={{dir: {tmp_path}/memory, every_seconds: 1.0e-9}}",
        "checkpoint.export={every_steps: 10, dtype: bfloat16}",
        f"faults=[{A_NAN}, {KILLS}]",
    ]
    done = cli("train", recipe_file, *tiny, *EVERYTHING, *more)
    assert done.returncode == 0, done.stderr

    assert [event["step"] for event in events_of(run, "resume")] == [6, 8]
    assert [event["step"] for event in events_of(run, "promoted")] == [6]
    assert_same_run(straight, run)
    saved = newest(run)
    assert all(any(name.startswith(kind) for name in saved.tensors) for kind in ("data.cursors", "ema.", "rng."))
    assert saved.meta["anomalies"]["skipped_steps"] == [3]
    assert not list(tmp_path.glob("memory/*/step-*")), "the last state is in a checkpoint"

    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert [line["samples"] for line in lines] == [4 * step + 4 * max(0, step - 8) for step in range(1, 17)]
    assert [line["step"] for line in lines if "val_loss" in line] == [8, 16]
    assert lines[15]["loss"] < lines[0]["loss"] - 0.5

    # Step 10 has a checkpoint because of the export.
    assert [event["step"] for event in events_of(run, "export")] == [10] and not events_of(run, "export_failed")
    again = export_hf(run / "checkpoints" / "step-00000010", tmp_path / "again", dtype="bfloat16")
    exported = load_file(run / "exports" / "step-00000010" / "model.safetensors")
    assert_equal(exported, load_file(again / "model.safetensors"))


@pytest.fixture
def straight(finished, tmp_path):
    """Copy of a run that was not interrupted."""
    return Path(shutil.copytree(finished, tmp_path / "straight"))


def test_a_run_interrupted_by_ctrl_c_saves_and_resumes(recipe_file, quick, straight, tmp_path, cli):
    """Saves and snapshots are written beside training; no step follows the seventh before the signal has come."""
    options = [*quick, f"checkpoint.local={{dir: {tmp_path}/memory, every_seconds: 1.0e-9}}"]
    process = StartedCommand("train", recipe_file, *options, prepare=partial(wait_for_a_stop_after, 7))
    for line in process.stdout:
        if "step 5/40" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGINT, rest
    assert "the same command goes on" in rest and "Traceback" not in rest
    [stopped] = [event["step"] for event in events_of(tmp_path / "run", "end")]
    second = cli("train", recipe_file, *options)
    assert second.returncode == 0 and f"resumed at step {stopped} of 40" in second.stdout, second.stderr
    assert events_of(tmp_path / "run", "snapshot"), "some were written"
    assert_same_run(straight, tmp_path / "run")
    assert [(line["step"], line["samples"]) for line in metrics_of(straight)] == [(n, 8 * n) for n in range(5, 41, 5)]


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
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
    assert any(name.startswith("optimizer.momentum.") for name in newest(tmp_path / "run").tensors)


def test_a_run_resumes_from_the_required_step_or_fails(cli, recipe_file, quick, straight):
    here = [f"run.dir={straight}", "training.steps=45", "schedule.horizon_steps=40"]
    before = {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")}
    refused = cli("train", recipe_file, *quick, *here, "--require-step", "30")
    assert refused.returncode == 2 and "the newest checkpoint is not of step 30" in refused.stderr, refused.stderr
    assert {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")} == before
    done = cli("train", recipe_file, *quick, *here, "--require-step", "40")
    assert done.returncode == 0 and "resumed at step 40 of 45" in done.stdout, done.stderr
    (straight / "checkpoints" / "step-00000045" / "COMMITTED").unlink()
    refused = cli("train", recipe_file, *quick, *here, "--require-step", "40", "--nproc", "2")
    assert refused.returncode == 2 and "step-00000045: COMMITTED is missing" in refused.stderr, refused.stderr


def test_only_the_first_attempt_checks_the_required_step(cli, recipe_file, quick, straight):
    """A fault after the next checkpoint: the second attempt resumes from that newer checkpoint."""
    here = [f"run.dir={straight}", "training.steps=55", "schedule.horizon_steps=40", "--require-step", "40"]
    fault = ["faults=[{kind: kill, at_step: 53}]", "recovery.backoff_seconds=0"]
    done = cli("train", recipe_file, *quick, *here, *fault, "--allow-faults")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 40 of 55" in done.stdout and "resumed at step 50 of 55" in done.stdout


def test_a_finished_run_has_nothing_to_do(cli, recipe_file, quick, straight):
    before = (straight / "metrics.jsonl").read_bytes()
    again = cli("train", recipe_file, *quick, f"run.dir={straight}")
    assert again.returncode == 0 and "finished at step 40" in again.stdout, again.stderr
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_coalescing_may_change_on_resume(cli, recipe_file, quick, straight, tmp_path):
    """Resumed with the other coalescing, final weights are as close as with another micro-batch size.

    Both change only the order of sums. The effect of such rounding differences after 23 steps is measured in the same
    test on the final weights (a loss rounded to fp32 may hide it). Coalescing may change them by at most ten times as
    much; a lost or permuted head changes them by more than a thousand times.
    """
    ends, apart = {}, {}
    expected = model_of(straight)
    for name, change in (("rounding", "batch.micro_batch=2"), ("coalescing", "model.coalesce=false")):
        here = f"run.dir={tmp_path / name}"
        assert cli("train", recipe_file, *quick, here, "training.stop_after=17").returncode == 0
        done = cli("train", recipe_file, *quick, here, change)
        assert done.returncode == 0, done.stderr
        pairs = zip(metrics_of(straight), metrics_of(tmp_path / name), strict=True)
        gaps = [abs(a["loss"] - b["loss"]) for a, b in pairs]
        assert gaps[:3] == [0, 0, 0], "steps 5, 10 and 15, before the change"
        ends[name] = max(gaps)
        apart[name] = float((model_of(tmp_path / name) - expected).norm() / expected.norm())
    assert 0 < apart["coalescing"] <= 10 * apart["rounding"] < 1e-4, apart
    assert ends["coalescing"] <= 10 * ends["rounding"] < 1e-3, ends
    (resumed,) = events_of(tmp_path / "coalescing", "resume")
    assert {"path": "model.coalesce", "old": True, "new": False} in resumed["changes"]


@pytest.mark.parametrize(  # tests/checkpoint/test_resume_check.py has every field
    "change",
    [
        "model.layers=3",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("training.seed=4", "data.sequence_length=16", "batch.global_batch=4")
        ),
    ],
)
def test_a_change_of_model_or_data_order_is_refused_and_nothing_is_lost(cli, recipe_file, quick, straight, change):
    before = {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")}
    refused = cli("train", recipe_file, *quick, f"run.dir={straight}", change)
    field = change.split("=")[0]
    assert refused.returncode == 2 and field in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
    assert {p: p.stat().st_mtime_ns for p in (straight / "checkpoints").rglob("*")} == before


def test_other_changes_are_allowed_and_recorded(cli, recipe_file, quick, straight):
    changed = ["training.steps=42", "schedule.horizon_steps=40", "evaluation.every_steps=21"]
    done = cli("train", recipe_file, *quick, f"run.dir={straight}", *changed)
    assert done.returncode == 0 and "finished at step 42" in done.stdout, done.stderr
    changes = {c["path"]: (c["old"], c["new"]) for e in events_of(straight, "resume") for c in e["changes"]}
    assert changes["training.steps"] == (40, 42) and changes["evaluation.every_steps"] == (20, 21)


def test_two_processes_cannot_share_a_run_directory(cli, recipe_file, quick, tmp_path):
    (tmp_path / "run").mkdir()
    with run_lock(tmp_path / "run"):
        second = cli("train", recipe_file, *quick)
    assert second.returncode == 2 and f"pid {os.getpid()}" in second.stderr
