"""Supervised runs with injected faults: the failure is reported, and the final bits are those of an undisturbed run."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.resilience.goodput import GOODPUT_PARTS
from hlat.runtime.process import REQUEUE_CODE
from tests.support.commands import StartedCommand
from tests.support.faults.killing import assert_same_run
from tests.support.held import find_injected_hangs_at_once

STEPS = 30
Hlat = Callable[..., "subprocess.CompletedProcess[str]"]
LAYOUTS = {"alone": [], "DP2": ["--nproc", "2", "parallel.zero=1"], "TP2": ["--nproc", "2", "parallel.tensor=2"]}


class Runs:
    """Runs of one recipe in separate folders, which share the prepared text."""

    def __init__(self, folder: Path, recipe: Path, corpus: Path, cli: Hlat) -> None:
        self._folder, self._recipe, self._corpus, self._cli = folder, recipe, corpus, cli

    def arguments(self, name: str, layout: str, *more: str) -> list[str]:
        return [
            "train",
            str(self._recipe),
            f"data.path={self._corpus}",
            f"data.prepared_dir={self._folder / 'data'}",
            f"run.dir={self._folder / name}",
            f"training.steps={STEPS}",
            "training.log_every=1",
            "checkpoint.every_steps=6",
            "evaluation.every_steps=null",
            "tracking.console=plain",
            "tracking.tensorboard=false",
            "recovery.backoff_seconds=0.05",
            *LAYOUTS[layout],
            *more,
        ]

    def train(
        self, name: str, layout: str, *more: str, prepare: Callable[[], None] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return self._cli(*self.arguments(name, layout, *more), prepare=prepare)

    def start(self, name: str, layout: str, *more: str) -> StartedCommand:
        """Start the command in the background, as a shell does."""
        return StartedCommand(*self.arguments(name, layout, *more))

    def undisturbed(self, layout: str) -> Path:
        """Folder of an undisturbed run, which is trained on first use."""
        folder = self.run_dir(f"quiet-{layout}")
        if not folder.exists():
            done = self.train(folder.name, layout)
            assert done.returncode == 0, done.stderr
        return folder

    def run_dir(self, name: str) -> Path:
        return self._folder / name

    def events(self, name: str, kind: str) -> list[dict]:
        lines = (self.run_dir(name) / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def runs(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory, cli: Hlat) -> Runs:
    folder = tmp_path_factory.mktemp("supervised")
    recipe = folder / "recipe.yaml"
    recipe.write_text(tiny_recipe)
    return Runs(folder, recipe, corpus, cli)


def faults(*injected: dict) -> list[str]:
    return [f"faults={json.dumps(injected)}", "--allow-faults"]


def test_a_killed_stopped_and_hanging_run_ends_with_the_same_bits(runs, tmp_path):
    done = runs.train(
        "disturbed",
        "alone",
        "recovery.hang_seconds=600",
        *faults(
            {"kind": "kill", "at_step": 8},
            {"kind": "stop", "at_step": 15, "phase": "backward"},
            {"kind": "hang", "at_step": 21, "phase": "optimizer"},
            {"kind": "exception", "at_step": 27},
        ),
        prepare=partial(find_injected_hangs_at_once, tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert_same_run(runs.run_dir("disturbed"), runs.undisturbed("alone"))
    incidents = [(event["kind"], event["step"], event["phase"]) for event in runs.events("disturbed", "incident")]
    assert incidents == [
        ("signal", 8, "forward"),
        ("hang", 15, "backward"),
        ("hang", 21, "optimizer"),
        ("exception", 27, "forward"),
    ]
    final = runs.events("disturbed", "goodput")[-1]
    assert final["final"] and final["attempts"] == 5
    assert set(final["seconds"]) == set(GOODPUT_PARTS) and min(final["seconds"].values()) > 0


HANGS = {
    "stopped": ("DP2", {"kind": "stop", "rank": 1, "at_step": 9, "phase": "backward"}, "stopped by a signal"),
    "asleep": ("DP2", {"kind": "hang", "rank": 1, "at_step": 9, "phase": "data"}, "waits for no other rank"),
    "asleep in a tensor-parallel layout": (
        "TP2",
        {"kind": "hang", "rank": 0, "at_step": 9, "phase": "forward"},
        "waits for no other rank",
    ),
    "deadlocked": ("DP2", {"kind": "deadlock", "rank": 1, "at_step": 9, "phase": "optimizer"}, "waits in resilience/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HANGS)
def test_the_hanging_rank_is_named_and_the_run_resumes(runs, case):
    layout, fault, why = HANGS[case]
    name = f"hang-{case.replace(' ', '-')}"
    done = runs.train(name, layout, "recovery.hang_seconds=4", *faults(fault))
    assert done.returncode == 0, done.stderr
    (hang,) = runs.events(name, "hang")
    assert (hang["ranks"], hang["phase"], hang["step"]) == ([fault["rank"]], fault["phase"], 9)
    assert why in hang["why"] and hang["seconds"] > 4 and "fault_injection.py" in hang["stack"]
    stacks = Path(hang["stacks"]).read_text()
    assert "==== rank 0" in stacks and "==== rank 1" in stacks and stacks.count("loop.py") >= 2
    assert_same_run(runs.run_dir(name), runs.undisturbed(layout))


@pytest.mark.slow
def test_both_ranks_of_a_deadlock_in_one_phase_are_named(runs):
    fault = {"kind": "deadlock", "rank": 1, "at_step": 9, "phase": "backward"}
    done = runs.train("both", "DP2", "recovery.hang_seconds=4", *faults(fault))
    assert done.returncode == 0, done.stderr
    (hang,) = runs.events("both", "hang")
    assert (hang["ranks"], hang["phase"], hang["step"]) == ([0, 1], "backward", 9)
    assert "rank 1 in resilience/fault_injection.py" in hang["why"]
    assert_same_run(runs.run_dir("both"), runs.undisturbed("DP2"))


@pytest.mark.slow
def test_a_slow_rank_is_reported_and_not_restarted(runs):
    fault = {"kind": "slow", "rank": 1, "at_step": 2, "steps": STEPS, "seconds": 0.4}
    done = runs.train("slow", "DP2", *faults(fault))
    assert done.returncode == 0 and "rank 1 is slow" in done.stderr, done.stderr
    (slow,) = runs.events("slow", "slow_rank")
    assert (slow["rank"], slow["phase"]) == (1, "forward") and slow["factor"] > 2
    assert runs.events("slow", "restart") == [] and runs.events("slow", "goodput")[-1]["attempts"] == 1
    assert_same_run(runs.run_dir("slow"), runs.undisturbed("DP2"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", "DP2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_preempted_run_saves_and_the_same_command_resumes(runs, layout, number):
    name = f"preempted-{layout}-{number.name}"
    process = runs.start(name, layout)
    wait_for_step(runs.run_dir(name), 4)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == REQUEUE_CODE, output
    stopped = open_checkpoint(resolve(runs.run_dir(name))).step
    assert 4 <= stopped < STEPS and f"stopped at step {stopped}" in output
    assert runs.train(name, layout).returncode == 0
    assert_same_run(runs.run_dir(name), runs.undisturbed(layout))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigterm", "sigusr1"])
def test_preempting_one_rank_stops_all(runs, kind):
    done = runs.train(kind, "DP2", *faults({"kind": kind, "rank": 1, "at_step": 9}))
    assert done.returncode == REQUEUE_CODE, done.stderr
    assert runs.train(kind, "DP2").returncode == 0
    assert_same_run(runs.run_dir(kind), runs.undisturbed("DP2"))


@pytest.mark.slow
def test_a_deadline_stops_the_run(runs):
    name = "deadline"
    slow = faults({"kind": "slow", "at_step": 1, "steps": STEPS, "seconds": 0.5})
    done = runs.train(name, "DP2", "recovery.deadline_seconds=12", *slow)
    assert done.returncode == REQUEUE_CODE and "(deadline)" in done.stdout, done.stdout + done.stderr
    assert runs.train(name, "DP2").returncode == 0
    assert_same_run(runs.run_dir(name), runs.undisturbed("DP2"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", "DP2"])
def test_a_second_signal_aborts_the_save_and_loses_nothing_else(runs, layout):
    name = f"twice-{layout}"
    assert runs.train(name, layout, "training.stop_after=6").returncode == 0  # its save has ended
    slow = faults({"kind": "slow_disk", "at_step": 7, "steps": 9, "seconds": 600})
    process = runs.start(name, layout, *slow)
    wait_for_step(runs.run_dir(name), 8)  # the save of step 12 would take forever
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    time.sleep(3)  # signals within one second count as one
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in output, output
    _, alive = psutil.wait_procs(children, timeout=600)
    assert alive == []
    assert open_checkpoint(resolve(runs.run_dir(name))).step == 6
    assert runs.train(name, layout).returncode == 0
    assert_same_run(runs.run_dir(name), runs.undisturbed(layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", "DP2"])
def test_the_next_command_waits_for_ranks_of_a_killed_supervisor(runs, layout):
    name = f"orphaned-{layout}"
    process = runs.start(name, layout, *faults({"kind": "slow_disk", "at_step": 7, "seconds": 3}))
    wait_for_step(runs.run_dir(name), 8)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    done = runs.train(name, layout)
    assert done.returncode == 0, done.stderr
    assert "waiting for the previous run" in done.stdout
    assert psutil.wait_procs(children, timeout=600)[1] == []
    process.communicate()
    assert_same_run(runs.run_dir(name), runs.undisturbed(layout))


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a run has logged a step."""
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert time.monotonic() < deadline, f"the run did not reach step {step}"
        time.sleep(0.02)


def test_no_supervisor_means_no_restart(runs):
    done = runs.train("once", "alone", "--no-supervisor", *faults({"kind": "exception", "at_step": 8}))
    assert done.returncode == 1 and "InjectedFault: injected at step 8" in done.stderr
    assert runs.events("once", "restart") == [] and runs.events("once", "start") != []
