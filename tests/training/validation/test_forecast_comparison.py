"""The forecast of a run is registered once, and an alarm comes at the evaluation that the rule of the band says.

The witness of expected losses is a law written down here, of the alarm a walk through the losses by hand.
"""

import hashlib
import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hlat.config import Recipe, load_recipe
from hlat.forecast import (
    Forecast,
    ForecastWatch,
    Ladder,
    LadderRun,
    LossRange,
    ScalingLaw,
    conditions_of,
    expected_at,
    sizes_of,
    write_forecast,
    write_ladder,
)
from hlat.resilience import AnomalyPolicy
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import NumericsError, PlanError
from hlat.tracking import EventLog
from hlat.training.components import LoopStart
from hlat.training.saving.forecast_comparison import ForecastComparison
from tests.support.same_runs import assert_same_run, events_of, metrics_of

EVERY = 5  # steps between evaluations, of 100
HALF = 0.05  # half of the band of 4 of 5 runs: 5 % of the loss


def law(fraction: float) -> float:
    """The loss that the run is expected to have at a fraction of its tokens."""
    return 2.0 + 1.0 / fraction**0.5


def planted(recipe: Recipe) -> Forecast:
    """A forecast of this law with a point at each evaluation from step 10 on."""
    points = [(f, LossRange(law(f), law(f) / (1 + HALF), law(f) * (1 + HALF))) for f in np.arange(10, 101, 5) / 100]
    return Forecast("by-hand", recipe.total_tokens, points[-1][1], tuple(points), sizes_of(recipe))


class Run:
    """A run without a model: its step, its files, and the component under test."""

    def __init__(self, folder: Path, *overrides: str, watch: dict[str, Any] | None = None, step: int = 0) -> None:
        self.folder = folder / "run"
        self.folder.mkdir(exist_ok=True)
        words = ("data.path=none", "training.steps=100", f"run.dir={self.folder}", f"run.ladder={folder}", *overrides)
        self.recipe = recipe = load_recipe("quickstart", words)
        self.said: list[str] = []
        self.log = EventLog(self.folder / "events.jsonl")
        tracker: Any = SimpleNamespace(event=self.log.append, message=self.said.append, warn=self.said.append)
        self.state: Any = SimpleNamespace(
            recipe=recipe,
            runtime=SimpleNamespace(ranks=HostGroup()),
            anomalies=AnomalyPolicy(recipe.anomalies, recipe.batches, recipe.data.sequence_length),
            training_data=SimpleNamespace(epochs=lambda samples: {"books": samples / (40 * recipe.batch.global_batch)}),
            forecast_watch=ForecastWatch(**(watch or {})),
        )
        self.at(step)
        self.component = ForecastComparison(self.state, tracker)
        self.start = LoopStart(recipe, self.state.runtime, step, tracker, None)  # type: ignore[arg-type]

    def at(self, step: int) -> None:
        self.state.step, self.state.tokens = step, self.recipe.batches.tokens_before(step)

    def evaluate(self, step: int, loss: float) -> None:
        """Do what the loop does with the validation of a step, in its order."""
        self.at(step)
        self.component.compare(loss)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "val_loss": loss}) + "\n")
        self.component.before_step()

    def begin(self) -> "Run":
        self.component.begin(self.start)
        return self

    @property
    def alarms(self) -> list[dict[str, Any]]:
        return events_of(self.folder, "off_forecast")


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    """The folder of a run that has the forecast of the law, and has not begun."""
    run = Run(tmp_path)
    write_forecast(run.folder, planted(run.recipe), datetime(2026, 1, 1, tzinfo=UTC))
    return tmp_path


def noise(step: int) -> float:
    """Noise of a run: half the band to either side, so that nothing is too high."""
    return HALF * (-1) ** (step // EVERY)


STEPS = range(EVERY, 101, EVERY)


def test_a_run_on_the_law_raises_no_alarm(plant: Path) -> None:
    run = Run(plant, "anomalies.forecast=stop").begin()
    for step in STEPS:
        run.evaluate(step, law(step / 100) * (1 + noise(step)))
    assert run.alarms == []


# 99 % of a normal distribution, over 80 %: from tables of its quantiles.
LIMIT = (1 + HALF) ** (2.575829 / 1.281552)


@pytest.mark.parametrize(("rise", "alarmed"), [(LIMIT * 1.001, [60, 90]), (LIMIT * 0.999, [])])
def test_a_rise_alarms_at_its_third_evaluation_and_once(plant: Path, rise: float, alarmed: list[int]) -> None:
    """Up from step 50 to 70, then back, and up again from 80 on: the third evaluations are those of 60 and 90."""
    run = Run(plant).begin()
    run.log.append("anomaly", step=52, kind="loss_spike")
    run.log.append("anomaly", step=52, kind="loss_spike")
    run.log.append("anomaly", step=12, kind="non_finite")
    for step in STEPS:
        is_up = 50 <= step <= 70 or step >= 80
        run.evaluate(step, law(step / 100) * (rise if is_up else 1.0))
    assert [event["step"] for event in run.alarms] == alarmed
    for first in run.alarms[:1]:
        assert first["since"] == 45 and first["action"] == "warn"
        assert first["expected"] == pytest.approx(law(0.6)) and first["high"] == pytest.approx(law(0.6) * 1.05)
        # 40 steps are a pass, so that the second one began before step 45 and the third one after step 80.
        assert first["causes"][0].startswith("learning rate ")
        assert first["causes"][1:] == ["anomalies: 1, the last one a loss spike at step 52"]
        assert any("higher than noise explains. Since step 45: learning rate" in each for each in run.said)
    for second in run.alarms[1:]:
        assert second["causes"][0] == "pass 3 over books began"


def test_a_loss_that_is_no_number_counts(plant: Path) -> None:
    run = Run(plant).begin()
    for step in (50, 55, 60):
        run.evaluate(step, float("nan"))
    assert [event["step"] for event in run.alarms] == [60]


def test_before_the_first_point_of_the_curve_nothing_is_compared(plant: Path) -> None:
    run = Run(plant).begin()
    run.evaluate(5, 1e9)
    run.evaluate(10, 1e9)
    run.evaluate(15, 1e9)
    assert run.alarms == [] and run.state.forecast_watch.too_high == 2


def test_a_run_that_is_to_stop_does_so_before_its_next_step(plant: Path) -> None:
    run = Run(plant, "anomalies.forecast=stop").begin()
    run.evaluate(50, 1e9)
    run.evaluate(55, 1e9)
    with pytest.raises(NumericsError, match=r"until step 0.*anomalies\.forecast=warn"):
        run.evaluate(60, 1e9)
    # The checkpoint of step 60 lacks the evaluation of 60; its line has it. The same command stops again.
    again = Run(plant, "anomalies.forecast=stop", watch={**asdict(run.state.forecast_watch), "too_high": 2}, step=60)
    again.begin()
    with pytest.raises(NumericsError):
        again.component.before_step()
    assert [event["action"] for event in run.alarms] == ["stop"]


def test_ignored_it_is_compared_with_nothing(plant: Path) -> None:
    run = Run(plant, "anomalies.forecast=ignore").begin()
    for step in STEPS:
        run.evaluate(step, 1e9)
    assert run.alarms == []


def test_what_was_ignored_does_not_count_later(plant: Path) -> None:
    """Two too high, then a time of good ones that nobody compares: one more is no third in a row."""
    run = Run(plant).begin()
    run.evaluate(40, 1e9)
    run.evaluate(45, 1e9)
    ignored = Run(plant, "anomalies.forecast=ignore", watch=asdict(run.state.forecast_watch), step=45).begin()
    ignored.evaluate(50, law(0.5))
    again = Run(plant, watch=asdict(ignored.state.forecast_watch), step=52).begin()
    for step in (55, 60, 65):
        again.evaluate(step, 1e9)
    assert [event["step"] for event in run.alarms] == [65]


@pytest.mark.parametrize(("every", "count"), [("null", 1), ("50", 2), ("40", 3), ("5", 19)])
def test_a_run_with_too_few_evaluations_for_an_alarm_says_so(plant: Path, every: str, count: int) -> None:
    """The curve begins at step 10: every 50 steps those of 50 and 100 are compared, every 40 those of 40, 80, 100."""
    run = Run(plant, f"evaluation.every_steps={every}", "anomalies.forecast=stop").begin()
    told = [line for line in run.said if "make an alarm" in line]
    assert len(told) == (count < 3) and all(f"compares {count}: its forecast begins at 10%" in line for line in told)
    assert len(Run(plant, f"evaluation.every_steps={every}").begin().said) == 1, "once, when it is registered"


@pytest.mark.parametrize("has_line", [True, False])
@pytest.mark.parametrize("saved", range(45, 80, EVERY))
def test_a_resumed_run_alarms_as_the_uninterrupted_one(plant: Path, saved: int, has_line: bool) -> None:
    """Killed after the save of a step: its evaluation is in no checkpoint, and its line is there or is made anew."""
    losses = {step: law(step / 100) * (1.5 if step >= 50 else 1.0) for step in STEPS}
    run = Run(plant).begin()
    for step in range(EVERY, saved, EVERY):
        run.evaluate(step, losses[step])
    watch = asdict(run.state.forecast_watch)
    if has_line:
        run.evaluate(saved, losses[saved])
    resumed = Run(plant, watch=watch, step=saved).begin()
    for step in range(saved + EVERY * has_line, 101, EVERY):
        resumed.evaluate(step, losses[step])
    assert [event["step"] for event in resumed.alarms] == [60]


def test_a_rollback_forgets_the_evaluations_after_it(plant: Path) -> None:
    run = Run(plant).begin()
    run.evaluate(45, law(0.45))
    run.evaluate(50, 9.0)
    run.evaluate(55, 9.0)
    # The loop restores the state and drops the lines after the step.
    run.state.forecast_watch = ForecastWatch(run.state.forecast_watch.sha256, 0, 45)
    file = run.folder / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    run.at(50)
    run.component.after_rollback(50)
    assert run.state.forecast_watch.too_high == 1


def test_how_often_a_run_on_the_law_alarms_by_chance() -> None:
    """A distance that a run keeps alarms in 0.5 % of the runs; noise that forgets itself practically never.

    20,000 runs: the standard deviation of the share is 0.05 % (binomial), so 4 of them are 0.2 %.
    """
    draw, sigma = np.random.default_rng(5), np.log(1 + HALF) / 1.281552
    expected = LossRange(2.0, 2.0 / (1 + HALF), 2.0 * (1 + HALF))

    def share(deviations: np.ndarray) -> float:
        watches = [(ForecastWatch(), row) for row in 2.0 * np.exp(deviations)]
        return float(np.mean([max(watch.check(0, loss, expected) for loss in row) >= 3 for watch, row in watches]))

    kept = np.repeat(draw.normal(0, sigma, (20_000, 1)), 4, axis=1)
    assert share(kept) == pytest.approx(0.005, abs=0.002)
    assert share(draw.normal(0, sigma, (20_000, 4))) < 1e-4  # 2 (1/200)^3 of the runs: none of 20,000


def small_ladder(folder: Path, recipe: Recipe, least: float = 1.5) -> Ladder:
    """Runs of a law, exactly."""
    truth, sizes, runs = ScalingLaw(least, 30.0, 60.0, 0.3, 0.35), sizes_of(recipe), []
    for share in (0.1, 0.2, 0.4):
        for length in (0.1, 0.3, 0.8):
            size, tokens = {kind: each * share for kind, each in sizes.items()}, int(recipe.total_tokens * length)
            end = truth.loss(size["flops"], tokens)
            curve = tuple((f, end * (1 + (1 - f))) for f in (0.1, 0.5, 1.0))
            runs.append(LadderRun(f"{share} {length}", size, tokens, end, curve))
    ladder = Ladder(tuple(runs), conditions_of(recipe))
    write_ladder(folder, ladder)
    return ladder


def test_the_forecast_is_registered_once_and_kept(tmp_path: Path) -> None:
    recipe = Run(tmp_path).recipe
    ladder = small_ladder(tmp_path, recipe)
    run = Run(tmp_path).begin()
    first = (run.folder / "forecast.json").read_bytes()
    content = json.loads(first)
    truth = ScalingLaw(1.5, 30.0, 60.0, 0.3, 0.35).loss(sizes_of(recipe)["flops"], recipe.total_tokens)
    assert content["ladder"] == ladder.id and content["end"]["loss"] == pytest.approx(truth, rel=1e-3)
    # The hash is that of the other values, as JSON with sorted keys.
    rest = json.dumps({name: value for name, value in content.items() if name != "sha256"}, sort_keys=True)
    assert content["sha256"] == hashlib.sha256(rest.encode()).hexdigest()
    (event,) = events_of(run.folder, "forecast")
    assert (event["step"], event["loss"], event["sha256"]) == (0, content["end"]["loss"], content["sha256"])
    assert f"validation loss {content['end']['loss']:.3f} at the end" in run.said[0]
    small_ladder(tmp_path, recipe, least=1.0)
    Run(tmp_path, step=10).begin()
    (tmp_path / "ladder.json").unlink()
    Run(tmp_path, step=20).begin()
    assert (run.folder / "forecast.json").read_bytes() == first and len(events_of(run.folder, "forecast")) == 1


def test_an_edited_forecast_is_refused(plant: Path) -> None:
    run = Run(plant).begin()
    file = run.folder / "forecast.json"
    whole = file.read_text()
    file.write_text(whole.replace(f"{law(1.0)}", "9.0", 1))
    with pytest.raises(PlanError, match="edited"):
        Run(plant).begin()
    file.unlink()
    other = replace(planted(run.recipe), ladder="other")
    write_forecast(run.folder, other, datetime(2026, 1, 1, tzinfo=UTC))  # with a hash of its own
    with pytest.raises(PlanError, match="not the forecast that this run registered"):
        Run(plant).begin()
    file.write_text(whole)
    assert len(Run(plant).begin().said) == 1


def test_a_forecast_that_does_not_hold_is_not_compared(plant: Path) -> None:
    Run(plant).begin()
    longer = Run(plant, "training.steps=120").begin()
    (plant / "run" / "forecast.json").unlink()
    removed = Run(plant).begin()
    for run, said in ((longer, "the recipe is now of another one"), (removed, "was removed")):
        assert said in run.said[-1]
        for step in (50, 55, 60):
            run.evaluate(step, 1e9)
        assert run.alarms == []


def test_a_fork_does_not_inherit_the_count_of_its_parent(plant: Path) -> None:
    parents = {"sha256": "0" * 64, "too_high": 7, "good_step": 3}
    fork = Run(plant, "anomalies.forecast=stop", watch=parents, step=40).begin()
    fork.component.before_step()
    assert asdict(fork.state.forecast_watch) | {"sha256": ""} == {"sha256": "", "too_high": 0, "good_step": 40}


def test_expected_losses_lie_between_the_points() -> None:
    points = ((0.2, LossRange(4.0, 3.0, 5.0)), (0.6, LossRange(2.0, 1.5, 2.5)), (1.0, LossRange(1.0, 0.5, 1.5)))
    forecast = Forecast("x", 100, points[-1][1], points)
    assert expected_at(forecast, 0.3) == pytest.approx((3.5, 2.625, 4.375))
    assert expected_at(forecast, 1.0) == points[-1][1] and expected_at(forecast, 0.19) is None
    assert expected_at(forecast, 1.01) is None


LOW = "anomalies.forecast=stop"


def plant_low(run: Path, recipe: Path, words: list[str], share: float) -> None:
    """Give a run a forecast that it is above from a fraction on."""
    run.mkdir()
    resolved = load_recipe(recipe, words)
    points = [(0.05, LossRange(9.0, 8.0, 10.0)), (share, LossRange(9.0, 8.0, 10.0))]
    points += [(share + 0.01, LossRange(0.1, 0.09, 0.11)), (1.0, LossRange(0.1, 0.09, 0.11))]
    forecast = Forecast("by-hand", resolved.total_tokens, points[-1][1], tuple(points), sizes_of(resolved))
    write_forecast(run, forecast, datetime(2026, 1, 1, tzinfo=UTC))


SHORT = ["evaluation.every_steps=2", "training.log_every=1", "tracking.tensorboard=false", "checkpoint.every_steps=5"]


def test_a_run_off_its_forecast_ends_as_one_that_diverges(cli, recipe_file, quick, tmp_path) -> None:
    """Steps 12, 14 and 16 are the first evaluations above the forecast: no step 17, exit code 4."""
    words = [*quick, *SHORT, f"run.ladder={tmp_path}", LOW]
    plant_low(tmp_path / "run", recipe_file, words, share=11 / 40)
    done = cli("train", recipe_file, *words)
    assert done.returncode == 4 and "above the forecast" in done.stderr
    assert "forecast: validation loss 0.100 at the end, 0.090 to 0.110 in 4 of 5 runs" in done.stdout
    run = tmp_path / "run"
    assert metrics_of(run)[-1]["step"] == 16 and "val_loss" in metrics_of(run)[-1]
    (event,) = events_of(run, "off_forecast")
    assert (event["step"], event["since"], event["action"]) == (16, 10, "stop")
    assert [each["step"] for each in events_of(run, "error")] == [16]


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["{at_step: 14, phase: evaluation}", "{at_step: 16, phase: evaluation}",
                                  "{at_step: 16, phase: checkpoint}", "{at_step: 17}", "{at_step: 19}"])  # fmt: skip
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_killed_run_records_what_the_quiet_one_does(
    cli, recipe_file, quick, tmp_path, kill: str, processes: str
) -> None:
    words = [*quick, *SHORT, "checkpoint.every_steps=2", "training.steps=24", f"run.ladder={tmp_path}"]
    words += ["recovery.backoff_seconds=0", "checkpoint.background=false", "checkpoint.keep_last=30"]
    for name, faults in (("quiet", []), ("killed", ["--allow-faults", f"faults=[{{kind: kill, {kill[1:-1]}}}]"])):
        own = [*words, f"run.dir={tmp_path / name}"]
        plant_low(tmp_path / name, recipe_file, own, share=11 / 24)
        done = cli("train", recipe_file, *own, "--nproc", processes, *faults)
        assert done.returncode == 0, done.stderr
    quiet, killed = (tmp_path / name for name in ("quiet", "killed"))
    assert len(events_of(killed, "resume")) == 1
    assert_same_run(killed, quiet)
    for kind in ("forecast", "off_forecast"):
        (ours,), (theirs,) = events_of(killed, kind), events_of(quiet, kind)
        assert ours | {"time": ""} == theirs | {"time": ""}
