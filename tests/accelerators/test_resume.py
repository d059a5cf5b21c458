"""Runs that are killed, moved between the CPU and the stand-in, or hang."""

import json
from pathlib import Path

import pytest

from tests.accelerators.conftest import Runs, losses
from tests.accelerators.test_training import assert_close
from tests.support.same_runs import assert_same_run, events_of

pytestmark = pytest.mark.slow


def faults(*injected: dict) -> list[str]:
    return [f"faults={json.dumps(injected)}", "--allow-faults"]


@pytest.mark.parametrize("mode", ["fp32", "bf16-sr"])
def test_a_killed_run_goes_on_with_the_same_bits(runs: Runs, mode: str) -> None:
    options = ["--nproc", "2", f"precision.mode={mode}"]
    quiet = runs.on_neuron(f"quiet-{mode}", *options)
    killed = runs.on_neuron(f"killed-{mode}", *options, *faults({"kind": "kill", "at_step": 5, "rank": 1}))
    (incident,) = events_of(killed, "incident")
    assert incident["rank"] == 1 and incident["restart"]
    assert_same_run(killed, quiet)


def test_a_hang_is_found_and_the_run_goes_on_with_the_same_bits(runs: Runs) -> None:
    quiet = runs.on_neuron("quiet", "--nproc", "2")
    hung = runs.on_neuron(
        "hung", "--nproc", "2", "recovery.hang_seconds=6", *faults({"kind": "hang", "at_step": 5, "rank": 1})
    )
    (hang,) = events_of(hung, "hang")
    assert hang["rank"] == 1 and hang["step"] == 5
    assert_same_run(hung, quiet)


def test_online_data_and_a_resume_in_the_middle(runs: Runs) -> None:
    own = f"data.prepared_dir={runs.folder('online-data')}"  # tokenized data is another kind of folder
    online = ["--nproc", "2", "data.mode=online", "data.streams=8", own]
    straight = runs.on_neuron("online", *online)
    halves = runs.on_neuron("online-halves", *online, "training.stop_after=4")
    assert len(losses(halves)) == 4
    runs.on_neuron("online-halves", *online)
    assert_same_run(halves, straight)


@pytest.mark.parametrize("first", ["cpu", "neuron"])
@pytest.mark.parametrize("mode", ["fp32", "bf16-sr"])
def test_a_run_moves_between_the_cpu_and_the_device(runs: Runs, first: str, mode: str) -> None:
    """Other kernels compute it there, which the second part has to accept."""
    name, options = f"moved-{first}-{mode}", [f"precision.mode={mode}"]
    half = [*options, "training.stop_after=3"]

    def on_cpu(words: list[str]) -> Path:
        from tests.support.commands import hlat  # noqa: PLC0415

        done = hlat(*runs.words(name, *words))
        assert done.returncode == 0, done.stderr
        return runs.folder(name)

    if first == "cpu":
        on_cpu(half)
        run = runs.on_neuron(name, "--nproc", "2", *options, "run.deterministic=false")
    else:
        runs.on_neuron(name, "--nproc", "2", *half)
        run = on_cpu([*options, "run.deterministic=false"])
    reference = runs.on_cpu("cpu" if mode == "fp32" else "cpu-sr", *options)
    assert_close(run, reference, "fp32" if mode == "fp32" else "bf16")
