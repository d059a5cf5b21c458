"""Errors of users: one message, exit code 2, no traceback, nothing half-written."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.commands import StartedCommand
from tests.support.held import hold_imports


def refused(done, *says):
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    for words in says:
        assert words in done.stderr, done.stderr


def test_check_says_good_and_what_it_amounts_to(cli, recipe_file, tiny):
    done = cli("check", recipe_file, *tiny)
    assert done.returncode == 0 and "good" in done.stdout and "40 steps" in done.stdout


def test_check_prints_every_problem_and_leaves_with_2(cli, recipe_file):
    refused(
        cli("check", recipe_file, "model.heads=5", "trainig.steps=1"),
        "model.heads",
        "data.path",
        "trainig",
        "'training'",
    )


def test_check_json_is_the_resolved_recipe_and_reads_back_the_same(cli, recipe_file, tiny, tmp_path):
    first = cli("check", recipe_file, *tiny, "--json")
    resolved = json.loads(first.stdout)
    assert resolved["model"]["max_sequence_length"] == 32 and resolved["training"]["steps"] == 40
    (tmp_path / "again.yaml").write_text(first.stdout)
    assert json.loads(cli("check", tmp_path / "again.yaml", "--json").stdout) == resolved


def test_schema_is_json_schema_that_names_the_sections(cli):
    schema = json.loads(cli("schema").stdout)
    assert {"run", "model", "data", "batch", "optimizer", "schedule", "training"} <= schema["properties"].keys()


def test_a_missing_corpus(cli, recipe_file, tiny, tmp_path):
    refused(cli("train", recipe_file, *tiny, "data.path=/no/such/corpus.txt"), "/no/such/corpus.txt")
    assert not (tmp_path / "run" / "data" / "manifest.json").exists()


def test_a_corpus_too_small_for_one_sample(cli, recipe_file, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    refused(cli("train", recipe_file, *tiny, f"data.path={tmp_path / 'short.txt'}", "data.validation.fraction=0"), "32")


def test_a_tokenizer_larger_than_the_model(cli, recipe_file, tiny, tmp_path):
    assert cli("data", "prepare", recipe_file, *tiny).returncode == 0
    tokenizer = next((tmp_path / "run" / "data").rglob("tokenizer.json"))
    done = cli(
        "train", recipe_file, *tiny, "model.vocab_size=300", f"data.tokenizer.path={tokenizer}",
        f"data.prepared_dir={tmp_path / 'other'}",
    )  # fmt: skip
    refused(done, "the model only 300", "model.vocab_size")


@pytest.mark.parametrize(
    "override",
    [
        "model.preset=[a]",
        "include=5",
        "training.seed=99999999999999999999",
        "model.rope.scaling={kind: linear, factr: 2}",
    ],
)
def test_odd_values_in_a_recipe(cli, recipe_file, tiny, override):
    refused(cli("check", recipe_file, *tiny, override), override.partition("=")[0].split(".")[-1])


def test_a_glob_is_an_override(cli, recipe_file, tiny, corpus):
    done = cli("check", recipe_file, *tiny, "data.path=*.txt", "--json", cwd=corpus)
    assert json.loads(done.stdout)["data"]["path"] == "*.txt", done.stderr


def test_training_that_diverges_ends_and_keeps_the_last_good_checkpoint(cli, recipe_file, tiny, tmp_path):
    assert cli("train", recipe_file, *tiny, "training.stop_after=6").returncode == 0
    wild = ["optimizer.lr=1e30", "optimizer.clip_norm=null", "checkpoint.every_steps=1", "checkpoint.keep_last=1"]
    run, fork, mended = tmp_path / "run", tmp_path / "fork", tmp_path / "mended"
    assert cli("fork", run, "--to", fork, *wild).returncode == 0
    done = cli("train", fork / "recipe.yaml")
    assert done.returncode == 4 and "diverged" in done.stderr and "step-0000000" in done.stderr, done.stderr
    kept = sorted(path.name for path in (fork / "checkpoints").iterdir() if path.name.startswith("step"))
    assert len(kept) == 1
    assert cli("generate", fork, "--prompt", "the", "--max-tokens", "3").returncode == 0
    tame = ["optimizer.lr=3.0e-3", "optimizer.clip_norm=1", "training.stop_after=null"]
    assert cli("fork", fork, "--to", mended, *tame).returncode == 0
    again = cli("train", mended / "recipe.yaml")
    assert again.returncode == 0 and "finished at step 40" in again.stdout, again.stderr


def test_under_nohup_neither_a_terminal_nor_a_reader_that_goes_away_ends_the_work(recipe_file, tiny, tmp_path):
    command = ["nohup", sys.executable, "-u", "-m", "hlat", "train", str(recipe_file), *tiny]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "step 5/" in line:
            process.send_signal(signal.SIGHUP)
            break
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 0 and errors == "", errors
    assert (tmp_path / "run" / "checkpoints" / "step-00000040").is_dir()


def test_a_terminal_that_hangs_up_leaves_a_checkpoint(recipe_file, tiny, tmp_path):
    process = StartedCommand("train", recipe_file, *tiny, "training.steps=1000000")
    for line in process.stdout:
        if "step 5/" in line:
            process.send_signal(signal.SIGHUP)
            break
    rest = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGHUP and "SIGHUP" in rest, rest
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def quiet(cli, tiny_recipe, corpus, tmp_path_factory):
    """A finished run that was told to be quiet: its command, and what it printed."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    command = ["train", folder / "recipe.yaml", f"data.path={corpus}", f"run.dir={folder / 'run'}"]
    return command, cli(*command, "tracking.console=plain", "--quiet")


def test_quiet_training_prints_the_end_only(quiet):
    _, done = quiet
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert [line.split()[0] for line in lines if not line.startswith("warning: ")] == ["finished", "checkpoint", "time"]


def test_fewer_steps_than_done_are_said(cli, quiet):
    done = cli(*quiet[0], "training.steps=10", "schedule.horizon_steps=40")
    assert done.returncode == 0 and "at step 40 already, past the 10" in done.stdout, done.stdout


def test_weights_of_another_tokenizer_are_refused(cli, quiet, tmp_path):
    command, _ = quiet
    other = ["data.tokenizer.vocab_size=290", f"run.dir={tmp_path / 'other'}"]
    run = command[-1].removeprefix("run.dir=")
    done = cli(*command[:-1], *other, f"checkpoint.init_from={run}")
    refused(done, "another tokenizer", "data.tokenizer.path=")


def test_a_run_directory_that_is_a_file(cli, recipe_file, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    done = cli("train", recipe_file, *tiny, f"run.dir={tmp_path / 'file'}")
    refused(done, "run.dir", "is a file, so no folder can be there")


@pytest.mark.parametrize("verb", [("generate", "--prompt", "x"), ("evaluate",), ("export", "--to", "out")])
def test_a_checkpoint_that_is_not_there(cli, verb, tmp_path):
    refused(cli(verb[0], tmp_path / "nowhere", *verb[1:], cwd=tmp_path), "nowhere")
    assert not (tmp_path / "out").exists()


def test_a_device_that_is_not_there(cli, recipe_file, tiny):
    refused(cli("train", recipe_file, *tiny, "run.device=neuron"), "run.device", "auto")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_before_the_first_step_is_said(recipe_file, tiny, processes):
    command = [sys.executable, "-u", "-m", "hlat", "train", str(recipe_file), *tiny, "--nproc", processes]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()  # a stage of the start
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    assert errors.splitlines() == ["SIGTERM: ended before the first step; run the same command again"]


@pytest.mark.parametrize("moment", ["start", "prepare", "train"])
def test_ctrl_c_leaves_nothing_that_stops_the_next_run(recipe_file, tiny, tmp_path, cli, moment):
    command = [sys.executable, "-u", "-m", "hlat", "train", str(recipe_file), *tiny]
    environment = {**os.environ, **(hold_imports(tmp_path) if moment == "start" else {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    seen = []
    if moment == "start":
        seen.append(process.stdout.readline())
        assert seen == ["importing PyTorch ...\n"]
    elif moment == "prepare":
        while not (tmp_path / "run" / "data" / "partial").exists():
            time.sleep(0.001)
    else:
        for line in process.stdout:
            seen.append(line)
            if "step 5/40" in line:
                break
    process.send_signal(signal.SIGINT)
    rest = process.communicate()[0]
    assert process.returncode == 130, (process.returncode, seen, rest)
    assert "Traceback" not in rest and ("interrupted" in rest or "SIGINT" in rest), rest
    done = cli("train", recipe_file, *tiny)
    assert done.returncode == 0 and "finished at step 40" in done.stdout, done.stderr


_UNTIL_A_SIGNAL = """
import os, pathlib, signal, time
if "RANK" in os.environ:
    pathlib.Path(__file__).with_name(f"rank-{os.environ['RANK']}").touch()
    while signal.SIGINT not in signal.sigpending():
        time.sleep(0.01)
"""


def test_ctrl_c_while_the_interpreters_of_ranks_start(recipe_file, tiny, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_UNTIL_A_SIGNAL)
    command = [sys.executable, "-m", "hlat", "train", str(recipe_file), *tiny, "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while len(list(tmp_path.glob("rank-*"))) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, (out, err)
    assert err.splitlines() == ["interrupted: nothing had been started"], err
