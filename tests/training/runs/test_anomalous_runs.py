"""A NaN and a spike in complete runs: the result equals, bit for bit, that of runs without these updates or samples."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint
from tests.support.same_runs import assert_same_run, assert_same_state, events_of, metrics_of, newest, rewrite

STEPS, EVERY, NAN, SPIKE = 20, 6, 9, 15
RUN = [
    f"training.steps={STEPS}",
    "training.log_every=1",
    f"checkpoint.every_steps={EVERY}",
    "checkpoint.keep_last=9",
    "anomalies.window=8",
    "tracking.console=plain",
    "tracking.tensorboard=false",
]
SPOILED = f"{{kind: spike, at_step: {SPIKE}}}"
A_NAN = f"{{kind: nan, at_step: {NAN}}}"
FORMS = {
    "prepared": [],
    "online": ["data.mode=online", "data.streams=8"],
    "prepared, DP2 ZeRO 1": ["--nproc", "2", "parallel.zero=1"],
    "online, TP2": ["data.mode=online", "data.streams=8", "--nproc", "2", "parallel.tensor=2"],
}
SOME = ["prepared"]  # the others are slow; tests/distributed covers two ranks in the default suite


@dataclass
class Runs:
    """Runs of one recipe and layout on the same text, each in its folder."""

    folder: Path
    form: list[str]
    data: list[str]  # overrides
    cli: Callable[..., "object"]

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def train(self, name: str, *more: str, faults: str = "", code: int = 0) -> Path:
        """Train to the end, with this exit code; return the folder of the run."""
        recipe, run = self.folder / "recipe.yaml", self[name]
        injected = ["--allow-faults", f"faults=[{faults}]"] if faults else []
        done = self.cli("train", recipe, *self.data, f"run.dir={run}", *RUN, *self.form, *more, *injected)
        assert done.returncode == code, done.stderr
        return run


def _forms(names=tuple(FORMS)):
    return [pytest.param(name, marks=[] if name in SOME else [pytest.mark.slow]) for name in names]


@pytest.fixture(scope="module", params=_forms())
def runs(request, tmp_path_factory, tiny_recipe, corpus, prepared, cli) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    data = folder / "data" if "online" in request.param else prepared
    made = Runs(folder, FORMS[request.param], [f"data.path={corpus}", f"data.prepared_dir={data}"], cli)
    made.train("plain")
    return made


@pytest.fixture(scope="module")
def rolled_back(runs) -> Path:
    """A run that was rolled back after a spike."""
    return runs.train("rolled back", "anomalies.spike=rollback", faults=SPOILED)


def test_a_step_with_a_nan_is_skipped_and_nothing_else_changes(runs):
    """As if the state before that step were the state after it, and the data position had advanced."""
    found = runs.train("nan", faults=A_NAN)
    wanted = runs.train("until", f"training.stop_after={NAN}", "checkpoint.every_steps=1")
    after = newest(wanted)
    before = open_checkpoint(after.path.with_name(f"step-{NAN - 1:08d}"))
    cursors = {name: tensor for name, tensor in after.load("").items() if name.startswith("data.")}
    assert bool(cursors) == ("data.mode=online" in runs.form)
    record = {**before.meta["anomalies"], "skipped_steps": [NAN]}
    rewrite(wanted, NAN, before.load("") | cursors, {**after.meta, "anomalies": record})
    runs.train(wanted.name)
    assert_same_state(found, wanted)
    assert int(newest(found).load("optimizer.")["step"]) == STEPS - 1
    ours, theirs = metrics_of(found), metrics_of(wanted)
    assert ours[NAN:] == theirs[NAN:] and ours[: NAN - 1] == metrics_of(runs["plain"])[: NAN - 1]
    assert ours[NAN - 1]["grad_norm"] == "NaN" and "NaN" not in json.dumps(ours[NAN:])
    (event,) = events_of(found, "anomaly")
    assert (event["step"], event["kind"], event["action"]) == (NAN, "non_finite", "skip")
    assert event["samples"] == [8 * (NAN - 1), 8 * NAN] and event["grad_norm"] == "NaN"
    assert event["batch_crc32"] == ours[NAN - 1]["batch_crc32"]
    assert event["window"]["steps"] == NAN - 1


@pytest.mark.slow  # tests/distributed/state/test_anomalies.py compares such runs of two ranks by default
def test_a_rolled_back_run_equals_the_run_that_never_read_those_samples(runs, rolled_back):
    wanted = runs.train("warned", f"training.stop_after={EVERY}")
    start = newest(wanted)
    skipped = {"step": SPIKE, "samples": [8 * (SPIKE - 1), 8 * SPIKE]}
    rewrite(
        wanted, EVERY, start.load(""), {**start.meta, "anomalies": {**start.meta["anomalies"], "rollbacks": [skipped]}}
    )
    runs.train("warned", faults=SPOILED)
    assert events_of(wanted, "anomaly") == [], "it never read them"
    assert_same_run(rolled_back, wanted)
    (event,) = events_of(rolled_back, "rollback")
    assert (event["step"], event["undone"]) == (EVERY * (SPIKE // EVERY), SPIKE)
    (anomaly,) = events_of(rolled_back, "anomaly")
    assert anomaly["samples"] == skipped["samples"] and anomaly["grad_norm"] > 100 * anomaly["window"]["norm_median"]
    samples = [line["samples"] for line in metrics_of(rolled_back)]
    assert samples == [8 * (step + (step >= SPIKE)) for step in range(1, STEPS + 1)]
    tokens = [line["tokens"] for line in metrics_of(rolled_back)]
    assert tokens == [256 * step for step in range(1, STEPS + 1)]
    seen = {line["batch_crc32"] for line in metrics_of(rolled_back)}
    plain = [line["batch_crc32"] for line in metrics_of(runs["plain"])]
    assert anomaly["batch_crc32"] == plain[SPIKE - 1] and seen >= set(plain) - {plain[SPIKE - 1]}
    assert anomaly["batch_crc32"] not in seen


KILLS = {
    "between spike and rollback": (SPIKE, "checkpoint"),
    "after it, before the next checkpoint": (SPIKE + 1, "forward"),
    "after the next checkpoint": (SPIKE // EVERY * EVERY + EVERY + 1, "backward"),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_run_killed_around_a_rollback_decides_the_same_again(runs, rolled_back, when):
    step, phase = KILLS[when]
    kill = f"{{kind: kill, at_step: {step}, phase: {phase}}}"
    met = 1 if step > SPIKE // EVERY * EVERY + EVERY else 2
    again = ["anomalies.spike=rollback", "recovery.backoff_seconds=0", "checkpoint.background=false"]
    run = runs.train(when, *again, faults=f"{SPOILED}, {kill}")
    assert len(events_of(run, "restart")) == 1, "it was killed, and its supervisor started it again"
    assert_same_run(run, rolled_back)
    assert len(events_of(run, "anomaly")) == met
    assert len(events_of(run, "rollback")) == met - (when == "between spike and rollback")


def test_without_a_checkpoint_the_rollback_goes_to_the_beginning(runs, rolled_back):
    """The result does not depend on the state to which the run is rolled back."""
    run = runs.train("no checkpoint", "anomalies.spike=rollback", "checkpoint.every_steps=null", faults=SPOILED)
    assert [event["step"] for event in events_of(run, "rollback")] == [0]
    assert_same_run(run, rolled_back)


def test_a_warning_changes_nothing_and_a_skipped_spike_is_not_applied(runs):
    warned = runs.train("only warned", faults=SPOILED)
    ignored = runs.train("ignored", "anomalies.spike=ignore", faults=SPOILED)
    assert_same_run(warned, ignored)
    skipped = runs.train("skipped", "anomalies.spike=skip", faults=SPOILED)
    found = {
        run.name: [(event["step"], event["action"]) for event in events_of(run, "anomaly")]
        for run in (warned, ignored, skipped)
    }
    assert found == {"only warned": [(SPIKE, "warn")], "ignored": [], "skipped": [(SPIKE, "skip")]}
    assert metrics_of(skipped)[: SPIKE - 1] == metrics_of(warned)[: SPIKE - 1]
    assert [line["samples"] for line in metrics_of(skipped)] == [8 * step for step in range(1, STEPS + 1)]
    weights = [newest(run).load("model.") for run in (warned, skipped)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert int(newest(skipped).load("optimizer.")["step"]) == STEPS - 1


def test_no_state_is_saved_while_numbers_are_not_finite(runs):
    """Weights that are ruined have no finite gradient: saved, they would take the place of good ones."""
    nans = ", ".join(f"{{kind: nan, at_step: {step}}}" for step in (2 * EVERY, 2 * EVERY + 1))
    run = runs.train("two NaN", faults=nans)
    saved = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert saved == [EVERY, 2 * EVERY + 2, 3 * EVERY, STEPS]


def test_a_run_ruined_by_its_learning_rate_begins_anew_with_a_lower_one(runs):
    """Step 1 leaves huge weights: every later gradient is NaN, and no state is worth keeping."""
    run = runs["ruined"]
    high = runs.train(run.name, "optimizer.lr=1e20", "schedule.warmup_steps=0", "anomalies.budget=10", code=4)
    assert not any((high / "checkpoints").iterdir())
    runs.train(run.name)
    assert_same_state(run, runs["plain"])


@pytest.mark.parametrize("spike", ["skip", "rollback"])
def test_beyond_the_budget_the_run_stops_with_the_last_good_checkpoint(runs, spike):
    """Three bad batches in a row, where two are allowed."""
    run = runs[f"spent on {spike}"]
    spikes = ", ".join(f"{{kind: spike, at_step: {step}}}" for step in range(SPIKE, SPIKE + 3))
    runs.train(run.name, f"anomalies.spike={spike}", "anomalies.budget=2", faults=spikes, code=4)
    assert [event["action"] for event in events_of(run, "anomaly")] == [spike, spike, "stop"]
    assert newest(run).meta["step"] == EVERY * (SPIKE // EVERY)
    (error,) = events_of(run, "error")
    assert "anomalies.budget" in error["message"] and "step-00000012" in error["message"]


def test_a_nan_stops_the_run_if_the_recipe_says_so(runs):
    run = runs["stops"]
    runs.train("stops", "anomalies.non_finite=stop", faults=A_NAN, code=4)
    assert [event["action"] for event in events_of(run, "anomaly")] == ["stop"]
    assert newest(run).meta["step"] == EVERY and len(metrics_of(run)) == NAN - 1
