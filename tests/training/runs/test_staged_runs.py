"""Runs with stages: killed at borders and between, on other ranks and layouts, they have the same bits and samples.

Three stages: short rows, another mixture with a decay from the current rate, and rows four times as long, with another
base of RoPE and another layout.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import hlat
from hlat.checkpoint.fork import _rate
from hlat.config import Recipe, parse_recipe
from hlat.optim import placed, rate_at
from hlat.reporting import summary_markdown
from hlat.reporting.run_record import read_run
from hlat.runtime.errors import CheckpointError
from hlat.training.components import StepEnd
from hlat.training.stages import check_fork_stages, find_stage, stage_record
from tests.support.same_runs import assert_same_run, assert_same_state, events_of, metrics_of

LENGTH, LONG = 32, 128
STEPS = (4, 3, 3)  # of each stage
RUN = [
    "training.log_every=1",
    "batch.global_batch=8",
    "batch.micro_batch=2",
    "evaluation.every_steps=null",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=20",
    "checkpoint.background=false",
    "recovery.backoff_seconds=0",
    "tracking.console=plain",
    "tracking.tensorboard=false",
    "schedule={kind: constant, warmup_steps: 2}",
    "training.ema={decay: 0.75, every_steps: 2}",
]
PHASES = ("data", "forward", "backward", "optimizer", "checkpoint")
KILLS = [(4, "optimizer"), (4, "checkpoint"), (5, "data"), (7, "checkpoint"), (8, "data"), (9, "backward")]
MORE_KILLS = [(3, "data"), (4, "forward"), (5, "backward"), (6, "checkpoint"), (7, "backward"), (8, "optimizer")]


def stages(long: str = "{}") -> str:
    short = f"{{name: short, steps: {STEPS[0]}}}"
    anneal = f"{{name: anneal, tokens: {STEPS[1] * 8 * LENGTH - 5}, weights: {{a: 1, b: 3}}, "
    anneal += "schedule: {kind: 1-sqrt, min_ratio: 0.1}}"
    last = f"{{name: long, steps: {STEPS[2]}, data: {{sequence_length: {LONG}}}, batch: {{global_batch: 4}}, "
    last += f"model: {{rope: {{theta: 40000}}}}, optimizer: {{lr: 0.002}}, parallel: {long}}}"
    return f"stages=[{short}, {anneal}, {last}]"


class Runs:
    """Runs of one recipe on the same data, each in its folder."""

    def __init__(self, folder: Path, cli: Callable[..., "object"]) -> None:
        self._folder, self._cli = folder, cli

    def train(self, name: str, *more: str, long: str = "{}") -> Path:
        """Train a run, or go on with it; return its folder."""
        here = [f"run.dir={self._folder / name}", f"data.prepared_dir={self._folder / 'data'}", stages(long)]
        done = self._cli("train", self._folder / "recipe.yaml", *here, *RUN, *more)
        self.printed, self.said = done.stdout, done.stderr
        assert done.returncode == 0, done.stderr
        return self._folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_recipe, corpus, cli) -> Runs:
    folder = tmp_path_factory.mktemp("staged")
    recipe = yaml.safe_load(tiny_recipe)
    text = "\n\n".join(file.read_text() for file in sorted(Path(corpus).rglob("*.txt")))
    for name, part in (("a", text[: len(text) // 2]), ("b", text[len(text) // 2 :])):
        (folder / f"{name}.txt").write_text(part)
    recipe["data"] |= {"sources": [{"path": str(folder / f"{n}.txt"), "name": n, "weight": 1} for n in "ab"]}
    recipe["data"].pop("path", None)
    for name in ("steps", "tokens"):
        recipe["training"].pop(name, None)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Runs(folder, cli)


@pytest.fixture(scope="module")
def straight(runs) -> Path:
    """An undisturbed run of one process."""
    run = runs.train("straight")
    assert runs.printed.count("in this stage") == 3 and "in this run" not in runs.printed
    return run


def batches(run: Path) -> list[tuple[int, ...]]:
    """Step, samples, tokens and checksum of each step."""
    return [tuple(line[name] for name in ("step", "samples", "tokens", "batch_crc32")) for line in metrics_of(run)]


def test_positions_rates_and_borders_are_those_of_the_recipe(runs, straight):
    sizes = [8] * (STEPS[0] + STEPS[1]) + [4] * STEPS[2]
    tokens = [8 * LENGTH] * (STEPS[0] + STEPS[1]) + [4 * LONG] * STEPS[2]
    found = batches(straight)
    assert [line[:3] for line in found] == [
        (step, sum(sizes[:step]), sum(tokens[:step])) for step in range(1, sum(STEPS) + 1)
    ]
    assert len({crc for *_, crc in found}) == sum(STEPS), "all batches differ"
    begun = [(event["step"], event["stage"]) for event in events_of(straight, "stage")]
    assert begun == [(4, "anneal"), (7, "long")]
    recipe = parse_recipe({**yaml.safe_load((straight / "recipe.yaml").read_text())})
    assert recipe.stages[1].tokens == STEPS[1] * 8 * LENGTH - 5
    rates = [line["lr"] for line in metrics_of(straight)]
    last = rates[STEPS[0] - 1]
    share = [1 - 0.9 * (step / sum(STEPS[1:])) ** 0.5 for step in range(1, sum(STEPS[1:]) + 1)]
    # The third stage names another rate: the same shape from there.
    wanted = [last * each for each in share[: STEPS[1]]] + [0.002 * each for each in share[STEPS[1] :]]
    assert rates[STEPS[0] :] == pytest.approx(wanted, rel=1e-12)


def test_a_run_is_shown_with_its_own_recipe_the_stage_that_it_is_in_and_one_attempt(runs, straight):
    found, record = hlat.show_run(straight), read_run(straight)
    assert [stage["name"] for stage in found.settings["stages"]] == ["short", "anneal", "long"]
    assert found.stage_words == "stage long, 3 of 3" and len(found.attempts) == 1
    assert record.recipe is not None and record.stage is not None
    assert record.recipe.total_steps == sum(STEPS) and record.recipe.data.sequence_length == LENGTH
    assert record.stage.data.sequence_length == LONG
    assert "step 10 of 10, stage long, 3 of 3" in summary_markdown([straight])


def test_a_signal_that_comes_while_the_last_step_of_a_stage_is_saved_stops_the_run_there(runs, straight):
    """After the vote of that step, where a callback sends it; the run goes on from there with the same bits."""
    run = runs.train("interrupted", "training.stop_after=3")

    def interrupt(end: StepEnd) -> None:
        if end.step == STEPS[0]:
            signal.raise_signal(signal.SIGINT)

    result = hlat.train(run / "recipe.yaml", {"training.stop_after": None}, on_step=interrupt)
    assert (result.step, result.reason) == (STEPS[0], "SIGINT") and not list(events_of(run, "stage"))
    assert_same_run(runs.train("interrupted"), straight)


@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.slow)], ids=["borders", "more"])
def test_killed_at_borders_and_between_a_run_has_the_same_bits(runs, straight, kills):
    faults = ", ".join(f"{{kind: kill, at_step: {step}, phase: {phase}}}" for step, phase in kills)
    run = runs.train(f"killed {len(faults)}", f"faults=[{faults}]", "--allow-faults")
    assert len(events_of(run, "resume")) + len(list(events_of(run, "start"))) == len(kills) + 1
    assert_same_run(run, straight)


@pytest.mark.parametrize(
    ("world", "long"),
    [("2", "{tensor: 2}"), pytest.param("4", "{tensor: 2, pipeline: 2}", marks=pytest.mark.slow)],
    ids=["2", "4"],
)
def test_on_several_ranks_the_third_stage_has_another_layout_and_the_same_samples(runs, straight, world, long):
    """Data-parallel ranks, then tensor- and pipeline-parallel ones; killed in the border, the run goes on bitwise."""
    run = runs.train(f"ranks {world}", "--nproc", world, long=long)
    assert batches(run) == batches(straight)
    # Sums of fp32 in another order: of 2,048 terms each, in ten steps.
    pairs = zip(metrics_of(run), metrics_of(straight), strict=True)
    assert all(one["loss"] == pytest.approx(other["loss"], rel=1e-4) for one, other in pairs)
    killed = "faults=[{kind: kill, at_step: 7, phase: checkpoint, rank: 1}, {kind: kill, at_step: 8, phase: data}]"
    again = runs.train(f"ranks {world} killed", "--nproc", world, killed, "--allow-faults", long=long)
    assert_same_run(again, run)


def test_a_run_that_has_left_a_stage_keeps_its_length(runs, straight):
    more = stages().replace(f"steps: {STEPS[0]}", f"steps: {STEPS[0] + 1}")
    with pytest.raises(AssertionError):
        runs.train("straight", more)
    assert "Stages that a run has left keep their lengths" in runs.said


def test_an_edit_of_an_earlier_stage_may_not_change_rates_of_steps_done():
    """Its lr gives the rate from which the next one starts; a stage that names the lr it has no longer starts there."""
    sections = {
        "model": {"preset": "tiny-1m"},
        "data": {"path": "x"},
        "schedule": {"min_ratio": 0.5, "warmup_steps": 0},
    }

    def run(first: dict[str, object], second: dict[str, object]) -> Recipe:
        decay = {"kind": "linear", "min_ratio": 0.5}
        stages = [{"name": "a", "steps": 5, **first}, {"name": "b", "steps": 5, "schedule": decay, **second}]
        return parse_recipe({**sections, "optimizer": {"lr": 1e-3}, "stages": stages})

    begun = run({}, {})
    newest: Any = SimpleNamespace(step=8, path="step-8", meta={"stage": stage_record(placed(begun.each_stage()[1]))})
    find_stage(begun, newest)
    now = rate_at(placed(begun.each_stage()[1]), 8)
    for edited, times in ((run({"optimizer": {"lr": 3e-3}}, {}), 3), (run({}, {"optimizer": {"lr": 1e-3}}), 2)):
        assert rate_at(placed(edited.each_stage()[1]), 8) == pytest.approx(times * now)
        find_stage(edited, newest, is_fork=True)
        with pytest.raises(CheckpointError, match="other learning rates"):
            find_stage(edited, newest)


def fake_checkpoint(stage: Recipe, step: int, **meta: Any) -> Any:
    recipe = stage.in_mode("fp32").model_dump(mode="json")
    saved = {"stage": stage_record(placed(stage)), "recipe": recipe, "data_fingerprint": "x", **meta}
    return SimpleNamespace(step=step, path=f"step-{step}", meta=saved)


def decayed(*more: dict[str, Any]) -> Recipe:
    stages = [{"name": "a", "steps": 5}, {"name": "b", "steps": 5, "schedule": {"kind": "linear", "min_ratio": 0.2}}]
    sections = {"model": {"preset": "tiny-1m"}, "data": {"path": "x"}, "batch": {"global_batch": 8}}
    return parse_recipe({**sections, "schedule": {"kind": "constant"}, "stages": [*stages, *more]})


def test_a_stage_after_a_finished_decay_needs_a_schedule_and_the_refusal_says_so():
    newest = fake_checkpoint(decayed().each_stage()[1], 10)
    added = {"name": "c", "steps": 5}
    with pytest.raises(CheckpointError, match=r"(?s)ended with batch 10, .*Give stage c a schedule of its own"):
        find_stage(decayed(added), newest)
    here, _ = find_stage(decayed({**added, "schedule": {"kind": "constant"}}), newest)
    assert rate_at(here, 11) == rate_at(here, 15) == pytest.approx(0.2 * here.optimizer.lr)


def test_the_rate_of_a_forks_next_step_counts_the_batches_that_its_parent_has_skipped():
    recipe = decayed()
    skipped = {"losses": [], "norms": [], "skipped_steps": [], "rollbacks": [{"step": 7, "samples": [48, 56]}]}
    stage = recipe.each_stage()[1]
    for step, batch in ((6, 7), (7, 8)):  # batch 6 is skipped: step 7 reads batch 7
        _, found = check_fork_stages(recipe, fake_checkpoint(stage, step, anomalies=skipped))
        assert found == batch
        assert _rate(recipe, step, found) == rate_at(placed(stage), batch + 1)
        assert _rate(recipe, step, found) == pytest.approx(stage.optimizer.lr * (1 - 0.8 * (batch - 4) / 5))


def test_too_little_text_for_the_last_stage_is_said_before_the_first_step(runs):
    more = stages().replace(f"steps: {STEPS[0]}", "steps: 100000")
    with pytest.raises(AssertionError):
        runs.train("too short", more)
    assert "none are left for it" in runs.said and "step 1/" not in runs.printed


def test_a_fork_of_a_run_with_stages_goes_on_in_them_and_a_run_without_may_get_some(runs, straight, cli, tmp_path):
    """From the middle of the second stage; and from a constant trunk, a decay in a stage of its own."""
    for name, more in (("same", []), ("decay", [stages().replace("theta: 40000", "theta: 20000")])):
        made = cli("fork", f"{straight}@6", "--to", tmp_path / name, *more)
        assert made.returncode == 0, made.stderr
    done = cli("train", tmp_path / "same/recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert_same_state(tmp_path / "same", straight)
    made = cli("fork", f"{tmp_path / 'same'}@8", "--to", tmp_path / "again")
    done = cli("train", tmp_path / "again/recipe.yaml")
    assert made.returncode == done.returncode == 0, made.stderr + done.stderr
    assert_same_state(tmp_path / "again", straight)
    refused = cli("fork", f"{straight}@6", "--to", tmp_path / "no", stages().replace("steps: 4", "steps: 5"))
    assert refused.returncode != 0 and "keep their lengths" in refused.stderr and not (tmp_path / "no").exists()
    trunk = runs.train("trunk", "stages=[]", "training.steps=4")
    parts = "[{name: trunk, steps: 4}, {name: decay, steps: 2, schedule: {kind: linear, min_ratio: 0}}]"
    made = cli("fork", trunk, "--to", tmp_path / "decayed", f"stages={parts}")
    assert made.returncode == 0, made.stderr
    done = cli("train", tmp_path / "decayed/recipe.yaml")
    assert done.returncode == 0, done.stderr
    rates = [line["lr"] for line in metrics_of(tmp_path / "decayed")]
    peak = metrics_of(trunk)[-1]["lr"]
    assert rates[-2:] == pytest.approx([peak / 2, 0], abs=1e-15)
