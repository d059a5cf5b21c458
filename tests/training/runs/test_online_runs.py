"""Runs on online data: the layout does not change the data, and no process outlives a run.

test_resume has the run on online data that is killed and resumed in the default suite.
"""

import json
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.commands import StartedCommand
from tests.support.held import wait_for_a_stop_after
from tests.support.same_runs import assert_same_run, metrics_of

ONLINE = ["data.mode=online", "data.streams=8"]


def _data_of(run: Path) -> list[tuple[object, object]]:
    """Return step, samples and checksum of the logged steps."""
    return [(line["step"], line["batch_crc32"]) for line in metrics_of(run)]


@pytest.fixture(scope="module")
def straight(cli, tiny_recipe, corpus, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("online")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    done = cli("train", folder / "recipe.yaml", f"data.path={corpus}", f"run.dir={folder / 'run'}", *ONLINE)
    assert done.returncode == 0, done.stderr
    assert "tokenizing while training: 60 blocks of the corpus, distributed to 8 streams" in done.stdout
    return folder / "run"


@pytest.fixture
def online(tiny):
    """Overrides for a run on online data."""
    return [*tiny, *ONLINE]


def test_a_stopped_and_resumed_run_is_the_same_run(cli, recipe_file, online, straight, tmp_path):
    first = cli("train", recipe_file, *online, "training.stop_after=17")
    assert first.returncode == 0, first.stderr
    second = cli("train", recipe_file, *online, "data.workers=3")
    assert second.returncode == 0 and "resumed at step 17" in second.stdout, second.stderr
    assert_same_run(straight, tmp_path / "run")


def test_a_killed_run_leaves_no_process(recipe_file, online):
    command = ["train", recipe_file, *online, "checkpoint.every_steps=3", "--no-supervisor"]
    process = StartedCommand(*command, prepare=partial(wait_for_a_stop_after, 12))
    for line in process.stdout:
        if "step 10/40" in line:
            break
    workers = [
        child for child in psutil.Process(process.pid).children() if "hlat.data.online.worker" in child.cmdline()
    ]
    assert workers
    process.send_signal(signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(workers, timeout=600)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


@pytest.mark.parametrize(
    "parts",
    [
        [("--nproc", "2"), ()],
        pytest.param(
            [("--nproc", "2", "parallel.tensor=2"), (), ("--nproc", "2", "parallel.pipeline=2")], marks=pytest.mark.slow
        ),
    ],
    ids=["DP2", "TP2 and PP2"],
)
def test_every_layout_reads_the_same_data_and_resumes_from_any_other(
    cli, recipe_file, online, straight, tmp_path, parts
):
    """Every logged batch is compared by its checksum."""
    for stop, layout in zip((13, *[4] * (len(parts) - 2), 100), parts, strict=True):
        done = cli("train", recipe_file, *online, f"training.stop_after={stop}", *layout)
        assert done.returncode == 0, done.stderr
    assert _data_of(tmp_path / "run") == _data_of(straight)


def test_other_streams_or_another_mode_are_refused(cli, recipe_file, online):
    assert cli("train", recipe_file, *online, "training.stop_after=2").returncode == 0
    for change in ("data.streams=4", "data.mode=prepared"):
        done = cli("train", recipe_file, *online, change)
        assert done.returncode == 2 and change.split("=")[0] in done.stderr, done.stderr


def test_the_data_commands_describe_the_online_data(cli, recipe_file, online, tmp_path):
    done = cli("data", "prepare", recipe_file, *online)
    assert done.returncode == 0 and "60 blocks of 60 files, for training" in done.stdout, done.stderr
    assert cli("data", "verify", recipe_file, *online).returncode == 0
    shown = cli("data", "show", recipe_file, *online, "--json")
    assert shown.returncode == 0 and "from 60 blocks" in json.loads(shown.stdout)["notes"][-1], shown.stderr
    part = cli("data", "prepare", recipe_file, *online, "--part", "1/2")
    assert part.returncode == 2 and "nothing is tokenized before training" in part.stderr
    blocks = tmp_path / "run" / "data" / "blocks.npy"
    blocks.write_bytes(blocks.read_bytes()[:-8] + b"\1" * 8)
    damaged = cli("data", "verify", recipe_file, *online)
    assert damaged.returncode == 2 and "blocks.npy: the checksum differs" in damaged.stderr
