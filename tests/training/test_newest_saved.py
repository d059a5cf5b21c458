"""A run continues from an older state if the newer one is damaged, but not if it has vanished."""

import shutil

import pytest

from hlat.checkpoint.protocol.reader import resolve
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import StateLostError
from hlat.runtime.storage.run_folder import EarlierAttempt
from hlat.training.run_state import DamagedCheckpoint, check_nothing_lost


def left(saved):
    return None if saved is None else EarlierAttempt(saved, "a1")


@pytest.mark.parametrize(
    ("found", "saved", "damaged"),
    [
        (None, None, []),  # first attempt
        (200, None, []),
        (None, 0, []),  # it had saved nothing
        (400, 400, []),
        (425, 400, []),  # a saver finished its save
        (200, 400, ["run/checkpoints/step-00000400.bad"]),
        (200, 400, ["local/run/step-00000410.0123456789abcdef/rank-00003.bad"]),  # snapshot
        (200, 400, ["s3://bucket/run/step-00000400"]),
    ],
)
def test_a_state_as_new_as_the_durable_one_is_accepted(tmp_path, found, saved, damaged):
    check_nothing_lost(
        HostGroup(), tmp_path, found, left(saved), [DamagedCheckpoint(path, ["torn"]) for path in damaged]
    )


def test_a_checkpoint_set_aside_by_an_earlier_attempt_is_accepted_as_damaged(tmp_path):
    """The earlier attempt ended before its first step, so the supervisor did not learn of it."""
    (tmp_path / "checkpoints" / "step-00000300.bad").mkdir(parents=True)
    with pytest.raises(StateLostError):
        check_nothing_lost(HostGroup(), tmp_path, 200, left(400), [])
    (tmp_path / "checkpoints" / "step-00000400.bad").mkdir()
    check_nothing_lost(HostGroup(), tmp_path, 200, left(400), [])


@pytest.mark.parametrize(
    ("found", "damaged", "there"),
    [
        (None, [], "there is none now"),
        (200, [], "the newest one now is of step 200"),
        (200, ["run/checkpoints/step-00000300.bad"], "the newest one now is of step 200"),  # an older checkpoint
    ],
)
def test_a_durable_state_that_has_vanished_is_an_error(tmp_path, found, damaged, there):
    with pytest.raises(StateLostError, match=f"the state of step 400 was durable, but {there}"):
        check_nothing_lost(
            HostGroup(), tmp_path, found, left(400), [DamagedCheckpoint(path, ["torn"]) for path in damaged]
        )


@pytest.mark.parametrize("spoiled", ["removed", "damaged"])
def test_the_next_attempt_checks_the_durable_step_of_the_supervisor(
    cli, recipe_file, quick, tmp_path, monkeypatch, spoiled
):
    """The supervisor passes the durable step on; the folder was changed between two attempts."""
    quiet = ["tracking.tensorboard=false", "evaluation.every_steps=null", "--no-supervisor"]
    done = cli("train", recipe_file, *quick, *quiet, "training.stop_after=20")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    newest = resolve(run)
    assert newest.name == "step-00000020"
    if spoiled == "removed":
        shutil.rmtree(newest)
    else:
        (newest / "meta.json").write_text("{}")
    monkeypatch.setenv("HLAT_GONE_ON", f"20 {(run / '.run-id').read_text()}")
    done = cli("train", recipe_file, *quick, *quiet, "training.stop_after=5")
    if spoiled == "damaged":
        assert done.returncode == 0 and "resumed at step 10" in done.stdout, done.stderr
        return
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "the state of step 20 was durable, but the newest one now is of step 10" in done.stderr
