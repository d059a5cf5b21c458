"""Injected faults happen where the recipe says, once in a run, and only if they are allowed."""

import errno
import json
import os
import signal

import pytest
import torch
from torch import nn

from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import BatchSchedule
from hlat.config.sections.operation import FaultConfig
from hlat.model import LocalParameter
from hlat.model.parameter_layout import RowLayout
from hlat.resilience import STORAGE_FAULTS, FaultInjector
from hlat.resilience.fault_injection import InjectedFault
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import StorageError
from hlat.runtime.process import REQUEUE_CODE
from hlat.training.faulty_disk import FaultyDisk
from tests.support.optim.parameters import config_of


def fault(**fields):
    return FaultConfig(**fields)


def held(dtype=torch.float32):
    parameter = nn.Parameter(torch.ones(4, 2, dtype=dtype))
    return LocalParameter("w", parameter, RowLayout((), 0, (2,)), 0, True, config_of())


def run_steps(faults, steps, global_batch=8, phases=("data", "forward", "backward", "reduce", "optimizer", "between")):
    for step in range(1, steps + 1):
        faults.begin_step(step, (step - 1) * global_batch)
        for phase in phases:
            faults(phase)


def test_a_fault_happens_once_in_its_step_and_phase(tmp_path):
    slept = []
    faults = [fault(kind="hang", at_step=3, phase="backward", seconds=7)]
    for _ in range(2):  # the second is the process after the restart
        run_steps(FaultInjector(faults, HostGroup(), tmp_path / "faults", BatchSchedule(8), slept.append), 5)
    assert slept == [7]


def test_a_fault_of_another_rank_does_not_happen_here(tmp_path):
    slept = []
    run_steps(
        FaultInjector(
            [fault(kind="hang", at_step=1, rank=1)], HostGroup(), tmp_path / "faults", BatchSchedule(8), slept.append
        ),
        3,
    )
    assert slept == []


def test_a_slow_fault_lasts_for_its_steps_and_recurs_after_a_restart(tmp_path):
    slept = []
    faults = [fault(kind="slow", at_step=2, steps=3, seconds=0.25)]
    for _ in range(2):
        run_steps(FaultInjector(faults, HostGroup(), tmp_path / "faults", BatchSchedule(8), slept.append), 9)
    assert slept == [0.25] * 6


@pytest.mark.parametrize("kind", ["exception", "oom"])
def test_injected_exceptions_are_raised(tmp_path, kind):
    faults = FaultInjector([fault(kind=kind, at_step=2)], HostGroup(), tmp_path / "faults", BatchSchedule(8))
    faults.set_parameters([held()])
    with pytest.raises(InjectedFault if kind == "exception" else RuntimeError, match=r"step 2|can't allocate memory"):
        run_steps(faults, 2)
    run_steps(faults, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bitflip_changes_a_single_bit(tmp_path, dtype):
    faults, parameter = (
        FaultInjector(
            [fault(kind="bitflip", at_step=2, phase="optimizer")], HostGroup(), tmp_path / "faults", BatchSchedule(8)
        ),
        held(dtype),
    )
    faults.set_parameters([parameter])
    run_steps(faults, 5)
    assert parameter.tensor.flatten().tolist() == [1.5] + [1.0] * 7


def test_gradients_are_changed_right_before_they_are_reduced(tmp_path):
    parameter = held()
    faults = FaultInjector(
        [fault(kind="nan", at_step=2), fault(kind="spike", at_step=4)],
        HostGroup(),
        tmp_path / "faults",
        BatchSchedule(8),
    )
    faults.set_parameters([parameter])
    seen = {}
    for step, first_sample in ((1, 0), (2, 8), (3, 16), (4, 24), (5, 24), (6, 32)):  # step 5 reads step 4's samples
        parameter.parameter.grad = torch.ones(4, 2)
        faults.begin_step(step, first_sample)
        for phase in ("forward", "backward"):
            faults(phase)
        assert bool((parameter.gradient == 1).all())
        faults("reduce")
        seen[step] = parameter.gradient.flatten()[:2].tolist()
    assert str(seen[2]) == "[nan, 1.0]"
    assert [seen[step] for step in (1, 3, 4, 5, 6)] == [[1, 1], [1, 1], [1000, 1000], [1000, 1000], [1, 1]]


def test_a_spike_of_a_step_in_a_ramp_covers_the_samples_of_its_batch(tmp_path):
    parameter = held()
    batches = BatchSchedule(8, ((2, 2), (1, 4)))  # they begin at 0, 2, 4, 8, 16
    faults = FaultInjector([fault(kind="spike", at_step=3)], HostGroup(), tmp_path / "faults", batches)
    faults.set_parameters([parameter])
    spoiled = []
    for step, first_sample in enumerate((0, 2, 4, 8, 16), start=1):
        parameter.parameter.grad = torch.ones(4, 2)
        faults.begin_step(step, first_sample)
        faults("reduce")
        spoiled.append(float(parameter.gradient.max()) > 1)
    assert spoiled == [False, False, True, False, False]


BLOCKS = replicated_chunks({"model.a": torch.arange(1000.0), "optimizer.b": torch.arange(1000.0)})


def store_with(tmp_path, *faults):
    disk = FaultyDisk(faults, 0, tmp_path / "faults", sleep=lambda seconds: None)
    return CheckpointStore(tmp_path / "checkpoints", 9, disk=disk)


@pytest.mark.parametrize(
    ("kind", "code"), [("enospc", errno.ENOSPC), ("eio", errno.EIO), ("unavailable", errno.ENOTCONN)]
)
def test_a_storage_fault_fails_its_number_of_saves_and_then_the_disk_works(tmp_path, kind, code):
    saved = {}
    for attempt in range(2):  # the second is the process after the restart
        store = store_with(tmp_path, fault(kind=kind, at_step=2, steps=2))
        for step in range(1, 6):
            for _ in range(2):  # with a retry
                try:
                    store.save(step, BLOCKS, {})
                except StorageError as error:
                    assert os.strerror(code) in str(error)
                else:
                    saved.setdefault(attempt, []).append(step)
                    break
    assert saved == {0: [1, 4, 5], 1: [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("kind", ["torn_write", "corrupt"])
def test_torn_and_corrupted_writes_are_found_by_the_checksums(tmp_path, kind):
    store = store_with(tmp_path, fault(kind=kind, at_step=2))
    for step in (1, 2, 3):
        store.save(step, BLOCKS, {})
    whole = [verify_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}") == [] for step in (1, 2, 3)]
    assert whole == [True, False, True]


def test_a_slow_disk_delays_each_file(tmp_path):
    slept = []
    disk = FaultyDisk([fault(kind="slow_disk", at_step=2, seconds=3)], 0, tmp_path / "faults", sleep=slept.append)
    store = CheckpointStore(tmp_path / "checkpoints", 9, disk=disk)
    store.save(1, BLOCKS, {})
    assert slept == []
    store.save(2, BLOCKS, {})
    assert len(slept) >= 4 and set(slept) == {3}
    assert set(STORAGE_FAULTS) >= {"slow_disk"}


def test_faults_are_refused_without_allow_faults(cli, recipe_file, tiny, tmp_path):
    refused = cli("train", recipe_file, *tiny, "faults=[{kind: kill, at_step: 3}, {kind: nan, at_step: 5}]")
    assert refused.returncode == 2
    assert "kill at step 3, nan at step 5" in refused.stderr and "--allow-faults" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_all_impossible_faults_are_reported_at_once(cli, recipe_file, tiny):
    wrong = "faults=[{kind: kill, at_step: 3, rank: 2}, {kind: deadlock, at_step: 5}, {kind: slow, at_step: 1}]"
    refused = cli("train", recipe_file, *tiny, wrong, "--allow-faults")
    assert refused.returncode == 2, refused.stderr
    for message in ("faults.0.rank = 2", "faults.1.kind = 'deadlock'", "faults.2.seconds = 3600"):
        assert message in refused.stderr, refused.stderr


def test_an_injected_sigterm_saves_and_stops_the_run(cli, recipe_file, tiny, tmp_path):
    stopped = cli("train", recipe_file, *tiny, "faults=[{kind: sigterm, at_step: 7}]", "--allow-faults")
    assert stopped.returncode == REQUEUE_CODE and "SIGTERM" in stopped.stdout, stopped.stdout + stopped.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "end"] == [7]
    again = cli("train", recipe_file, *tiny, "faults=[{kind: sigterm, at_step: 7}]", "--allow-faults")
    assert again.returncode == 0 and "resumed at step 7" in again.stdout
    assert signal.SIGTERM.name in next(event["reason"] for event in events if event["event"] == "end")
