"""Failures that occur on a Neuron device only: its memory, its compiler, and operators whose errors are seen late.

The stand-in fails with the texts of the public beta's source, where that shows them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.runtime.backend.faults import find_fault
from tests.accelerators.conftest import Runs
from tests.support.neuron.compiling import FAILS_ENV, SECONDS_ENV
from tests.support.neuron.device_module import MEMORY_ENV
from tests.support.neuron.running import FAULT_ENV, RankError, on_neuron
from tests.support.same_runs import assert_same_run, events_of


def allocate(sizes: list[int]) -> int:
    """Allocate tensors of some bytes one after the other; how many there was memory for."""
    kept = []
    for size in sizes:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="neuron"))
        except RuntimeError as error:
            fault = find_fault(str(error))
            assert fault is not None and fault.name == "NRT_RESOURCE" and fault.recurs, error
            break
    return len(kept)


def test_memory_has_an_end_and_what_is_freed_can_be_used_again() -> None:
    assert on_neuron(allocate, [600, 300, 300], env={MEMORY_ENV: "1000"}) == [2]
    assert on_neuron(allocate, [600, 400], env={MEMORY_ENV: "1000"}) == [2]


def fail_late(how: str) -> float:
    """Let an operator fail, and compute on; the error comes when the host waits for a result."""
    from tests.support.neuron.device_module import native  # noqa: PLC0415

    x = torch.ones(4, device="neuron")
    native().stand_in_fail_next(1202)
    x = (x + 1) * 2
    waits: dict[str, Any] = {"item": x.sum().item, "copy": x.cpu, "synchronize": torch.accelerator.synchronize}
    waits[how]()
    return 0.0


@pytest.mark.parametrize("how", ["item", "copy", "synchronize"])
def test_an_error_of_an_operator_is_seen_when_the_host_waits(how: str) -> None:
    with pytest.raises(RankError) as caught:
        on_neuron(fail_late, how)
    assert "waits[how]()" in str(caught.value)
    fault = find_fault(str(caught.value))
    assert fault is not None and fault.name == "NRT_EXEC_HW_ERR_NC_UE" and not fault.recurs


def refused(runs: Runs, name: str, *options: str, env: dict[str, str]) -> str:
    """Message of a run that fails: one attempt, no traceback."""
    done = runs.try_on_neuron(name, *options, "training.steps=2", "schedule.warmup_steps=0", env=env)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "restart" not in done.stderr and not events_of(runs.folder(name), "restart"), done.stderr
    return done.stderr


def test_a_run_that_does_not_fit_says_what_would_and_is_not_restarted(runs: Runs) -> None:
    said = refused(runs, "memory", env={MEMORY_ENV: str(1 << 20)})
    assert "device memory is used up. Use a smaller batch.micro_batch" in said and "out of memory" in said, said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[NCC_ILLC059] Encountered unexpected error", "the compiler failed. Look up its error code. run.compile=none"),
        pytest.param(
            "[NCC_EOOM001] The combined memory needed exceeds the limit",
            "needs more memory than the device has. Use a smaller batch.micro_batch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_graph_that_the_compiler_refuses_ends_the_run_and_keeps_its_cache(
    runs: Runs, tmp_path: Path, text: str, says: str
) -> None:
    """Code of earlier runs is not taken to be damaged: it may have taken hours to compile."""
    earlier = tmp_path / "rank-0" / "neff" / "MODULE_1" / "model.neff"
    earlier.parent.mkdir(parents=True, mode=0o700)
    earlier.write_text("code")
    said = refused(
        runs, f"compiler-{text[1:8]}", "run.compile=auto", f"run.compile_cache={tmp_path}", env={FAILS_ENV: text}
    )
    assert says in said and text in said, said
    assert earlier.is_file()


@pytest.mark.slow
def test_a_fault_of_hardware_that_is_seen_late_is_named_and_the_run_goes_on_with_the_same_bits(
    runs: Runs, tmp_path: Path
) -> None:
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"rank": 1, "step": 5, "status": 1202}))
    quiet = runs.on_neuron("late-quiet", "--nproc", "2")
    failed = runs.on_neuron("late", "--nproc", "2", env={FAULT_ENV: str(fault)})
    assert not fault.exists()
    (incident,) = events_of(failed, "incident")
    assert incident["rank"] == 1 and incident["restart"]
    assert "Replace the instance" in json.dumps(incident)
    assert_same_run(failed, quiet)


@pytest.mark.slow
def test_the_compiler_may_take_longer_than_a_hang(runs: Runs) -> None:
    run = runs.on_neuron("slow-compiler", "run.compile=auto", "recovery.hang_seconds=3", env={SECONDS_ENV: "8"})
    assert not events_of(run, "hang")
