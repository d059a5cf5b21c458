"""Known defects of HLAT's checkpoints, one test each; the docstring of a test describes the defect in HLAT."""

import signal
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch

from hlat.checkpoint import collect, restore
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_states import assert_equal, assert_is_step, save
from tests.support.checkpoint.saving_ranks import Rank, assert_is_full_state, reopen, run_ranks
from tests.support.checkpoint.stamped_parts import (
    KINDS,
    Layout,
    config_of,
    expected,
    expected_local,
    processes,
    saved_tensors,
    stamp,
)


def save_once_and_wait(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    assert rank.wait() is not None
    pipe.send("durable")
    signal.pause()


def test_the_marker_is_written_with_its_own_save(tmp_path: Path) -> None:
    """The marker of an asynchronous save was written at the next save, so a crash lost up to two intervals."""
    with run_ranks(2, save_once_and_wait, tmp_path) as (members, pipes):
        assert [pipe.recv() for pipe in pipes] == ["durable"] * 2
        for member in members:
            for process in [*psutil.Process(member.pid).children(), psutil.Process(member.pid)]:
                process.kill()
        assert_is_full_state(reopen(tmp_path).newest(), 1)


def test_checkpoints_kept_for_ever_are_in_the_same_folder(cli, recipe_file, quick, tmp_path: Path) -> None:
    """Checkpoints kept for ever went to a second folder, as did the pending marker of the first: the run crashed."""
    rules = ["checkpoint.every_steps=2", "checkpoint.keep_last=1", "checkpoint.keep_every_steps=5", "training.steps=21"]
    done = cli("train", recipe_file, *quick, *rules)
    assert done.returncode == 0, done.stderr
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-00000005", "step-00000010", "step-00000015", "step-00000020", "step-00000021"}


def test_saving_alternates_between_a_folder_and_its_subfolder(tmp_path: Path) -> None:
    """Saving alternately to a folder and its subfolder raised FileNotFoundError."""
    outer, inner = CheckpointStore(tmp_path / "output", 9), CheckpointStore(tmp_path / "output" / "saved", 9)
    for step in range(1, 7):
        store = outer if step % 2 else inner
        save(store, step)
        assert_is_step(store.newest(), step)
    assert outer.steps() == [1, 3, 5] and inner.steps() == [2, 4, 6]


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(shards=3), Layout(stages=(1, 2))], ids=str)
def test_moments_survive_a_change_of_layout(tmp_path: Path, layout: Layout) -> None:
    """With another number of processes the optimizer silently restarted from zero moments."""
    config = config_of("gqa")
    [alone] = processes(config, Layout())
    stamp(alone, 1)
    path = CheckpointStore(tmp_path, 1).save(5, collect(config, alone.held, alone.optimizer), {"step": 5})
    for process in processes(config, layout):
        stamp(process, 2)
        restore(open_checkpoint(path), config, process.held, process.optimizer)
        moments = 0
        for kind, parameter, tensor in saved_tensors(process):
            assert_equal({parameter.name: tensor}, {parameter.name: expected_local(kind, parameter, tensor, 1)})
            moments += kind != "model." and bool(tensor.count_nonzero())
        assert moments >= 2 * len(KINDS)


def test_weights_without_moments_cannot_be_restored_with_an_optimizer(tmp_path: Path) -> None:
    """If the optimizer's files did not fit, only the weights were loaded, and training continued."""
    config = config_of("gqa")
    weights = {name: tensor for name, tensor in expected(config, 1).items() if name.startswith("model.")}
    path = CheckpointStore(tmp_path, 1).save(5, replicated_chunks(weights), {"step": 5})
    [alone] = processes(config, Layout())
    stamp(alone, 2)
    with pytest.raises(CheckpointError, match=r"optimizer\.exp_avg"):
        restore(open_checkpoint(path), config, alone.held, alone.optimizer)
    for kind, parameter, tensor in saved_tensors(alone):
        assert torch.equal(tensor, expected_local(kind, parameter, tensor, 2)), "the parameters are unchanged"


def test_the_same_command_resumes_the_run(cli, recipe_file, quick, tmp_path: Path) -> None:
    """Resuming looked for a file named ``newest``, which was never written: every start began from step 0."""
    for stop, line in ((4, "stopped at step 4 of 12"), (4, "resumed at step 4"), (4, "resumed at step 8")):
        done = cli(
            "train",
            recipe_file,
            *quick,
            "training.steps=12",
            f"training.stop_after={stop}",
            "checkpoint.every_steps=null",
        )
        assert done.returncode == 0 and line in done.stdout, done.stdout + done.stderr
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 9).steps() == [8, 12]
