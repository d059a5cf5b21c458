"""A ladder trains every run once, whatever interrupts it, and forecasts from what has finished."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hlat.config import load_recipe
from hlat.forecast import Ladder, ScalingLaw, read_ladder, write_ladder
from hlat.ladder import LadderPlan, LadderQuestion, LadderReport, plan_ladder, read_results, record_results, run_ladder
from hlat.ladder import execution as trains
from hlat.ladder.planned_runs import PlannedRun
from hlat.planner import resolve_defaults
from hlat.runtime.errors import DataError, PlanError
from hlat.sweep import array_script
from tests.support.reporting import event, line, write_lines, write_run

# What it leaves open, runs choose: they record other values than the recipe has.
RECIPE = """
run: {name: target}
model: {vocab_size: 320, layers: 8, hidden_size: 64, intermediate_size: 192, heads: 8, kv_heads: 4}
data:
  path: PATH
  sequence_length: 16
  tokenizer: {vocab_size: 320}
  validation: {fraction: 0.02}
batch: {global_batch: 2}
schedule: {kind: wsd}
training: {tokens: 150k, seed: 3}
"""
SIZES, TOKENS = "w8,w16,w24", "0.6,1.2"
LAW = ScalingLaw(2.0, 30.0, 60.0, 0.35, 0.37)  # losses of 3 to 7 for models and texts as small as these


@pytest.fixture
def question(corpus: Path, tmp_path: Path) -> LadderQuestion:
    """A ladder of three sizes and two lengths, of some hundred steps each, and the first of them with other seeds."""
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("PATH", str(corpus)))
    return LadderQuestion(str(file), ("run.device=cpu",), sizes=SIZES, tokens=TOKENS, to=str(tmp_path / "ladder"))


def recorded(plan: LadderPlan, run: PlannedRun) -> dict[str, Any]:
    """The recipe that a run records on one process: with every value that it chooses, and the mode of its device."""
    recipe, _ = resolve_defaults(plan.recipe_of(run), 1)
    mode = recipe.precision.mode.replace("auto", "fp32")
    return recipe.in_mode(mode).with_determinism(True).model_dump(mode="json")


def pretend(plan: LadderPlan, finished: int | None = None) -> None:
    """Write folders of runs as if they had been trained, with losses of a known law."""
    for run in plan.runs[:finished]:
        loss = LAW.loss(run.flops / 6, run.tokens)
        steps = range(run.first + run.steps // 20, run.steps, run.steps // 20)
        lines = [line(step, val_loss=loss * (1 + 0.1 * (1 - step / run.steps)), seconds={}) for step in steps]
        begun = event("start", 0, step=run.first, recipe=recorded(plan, run))
        write_run(
            plan.folder / run.name, [*lines, line(run.steps, val_loss=loss, seconds={})], [begun, event("end", 90)]
        )


def test_the_report_has_the_law_of_the_runs_and_what_they_took(question: LadderQuestion):
    """Witness: losses written by a law of known constants; the fit and the forecast are its own."""
    question = replace(question, words=(*question.words, "schedule.warmup_steps=60"))
    plan = plan_ladder(question)
    plan = replace(plan, runs=tuple(replace(run, seconds=68.0, outside=8.0) for run in plan.runs))
    pretend(plan)
    report = LadderReport(plan, tuple(read_results(plan)))
    assert not report.missing and report.ladder is not None and report.forecast is not None
    for run in report.ladder.runs:
        assert run.loss == pytest.approx(LAW.loss(run.sizes["flops"], run.tokens)), "the last validation loss"
        assert run.curve[-1] == (1.0, run.loss) and len(run.curve) >= 20
        assert [at for at, _ in run.curve] == sorted({at for at, _ in run.curve}), "the trunk before a fork included"
    trunks = [plan.trunk_of(run).name for run in plan.runs]
    assert [run.trunk for run in report.ladder.runs] == trunks, "runs of a size and seed share noise"
    assert report.forecast.end.low <= report.forecast.end.loss <= report.forecast.end.high
    lines = report.lines()
    assert max(map(len, lines[:-1])) <= 80, max(lines, key=len)
    assert lines[0].split()[-2:] == ["planned", "actual"]
    assert "60 seconds" in lines[1] and "1.5 minutes" in lines[1], "both as records count, from begin to end"
    found = json.loads(json.dumps(report.to_dict()))
    assert [run["actual_seconds"] for run in found["runs"]] == [90.0] * 10
    assert found["seed_noise"] == 0.0, "losses of the law have none"
    assert found["law"]["E"]["low"] <= found["law"]["E"]["value"] <= found["law"]["E"]["high"]
    (warning,) = report.forecast.warnings
    assert "tokens per parameter" in warning
    longer = plan_ladder(replace(question, words=(*question.words, "training.tokens=300k")))
    other = LadderReport(longer, tuple(read_results(longer)))
    assert "schedule.warmup_share is 0.0064, and 0.013 in the ladder" in str(other.forecast)


def test_scores_of_the_last_validation_give_accuracies(question: LadderQuestion):
    """Scores of the last step count, and none of earlier validations; three are printed."""
    plan = plan_ladder(replace(question, words=(*question.words, "evaluation.tasks=[some.jsonl]")))
    pretend(plan)
    for trunk, *forks in plan.by_size():
        for run in (trunk, *forks):
            recipe = load_recipe(question.recipe, [*trunk.overrides, *run.overrides])
            assert list(recipe.evaluation.tasks) == ["some.jsonl"], "the run scores them"
    for run in plan.runs:
        path = plan.folder / run.name / "metrics.jsonl"
        *before, last = map(json.loads, path.read_text().splitlines())
        bits = last["val_loss"] / 5
        scores = {f"task/t{n}/{name}": value for n in range(4) for name, value in
                  (("bits_per_byte", bits), ("acc", 1 / (1 + math.exp(bits - 10))))}  # fmt: skip
        write_lines(path, [{**line, "task/early/acc": 0.5} for line in before] + [{**last, **scores}])
    report = LadderReport(plan, tuple(read_results(plan)))
    assert report.ladder is not None and report.forecast is not None
    for run in report.ladder.runs:
        assert run.scores["t3/bits_per_byte"] == pytest.approx(run.loss / 5) and "early/acc" not in run.scores
    value, low, high = report.forecast.tasks["t0"]
    wanted = 1 / (1 + math.exp(report.forecast.end.loss / 5 - 10))
    assert low < value < high and value == pytest.approx(wanted, abs=0.01)
    text = [line.strip() for line in report.lines()]
    assert f"t0  accuracy {value:.3f}, 80 % range {low:.3f} to {high:.3f}" in text and "1 more in --json" in text
    assert json.loads(json.dumps(report.to_dict()))["forecast"]["tasks"]["t3"] == [value, low, high]


def test_a_ladder_with_missing_runs_says_which_and_forecasts_from_five(question: LadderQuestion):
    plan = plan_ladder(question)
    pretend(plan, 9)
    report = LadderReport(plan, tuple(read_results(plan)))
    assert report.missing == [plan.runs[9].name] and report.forecast is not None
    assert any(plan.runs[9].name in text and "the law is from the other 9 runs" in text for text in report.lines())
    shutil.rmtree(plan.folder / plan.runs[1].name)
    fewer = LadderReport(plan, tuple(read_results(plan)))
    text = " ".join(" ".join(fewer.lines()).split())
    assert fewer.forecast is None and "4 finished runs that differ by more than their seed, and needs 5" in text


def test_runs_are_started_once_each_by_size_and_a_failure_stops_only_its_trunk(
    question: LadderQuestion, monkeypatch: pytest.MonkeyPatch
):
    """Witness: the commands that would be run; the second of them fails."""
    plan = plan_ladder(question)
    started = list[list[str]]()

    def run_hlat(words: list[str], *, silent: bool) -> tuple[int, bool]:
        started.append(words)
        folder = Path(next(word for word in words if word.startswith("run.dir=")).removeprefix("run.dir=").strip('"'))
        if "16x" not in folder.name:
            run = next(one for one in plan.runs if one.name == folder.name)
            recipe = recorded(plan, run)
            loss = {} if "24x" in folder.name else {"val_loss": 4.0}
            write_run(folder, [line(run.steps, **loss)], [event("start", 0, step=0, recipe=recipe), event("end", 5)])
        return 3 if "16x" in folder.name else 0, False

    monkeypatch.setattr(trains, "run_hlat", run_hlat)
    said = list[str]()
    results = run_ladder(plan, said.append, options=("--nproc", "2"))
    # Folders without checkpoints: no fork can be made, which is said.
    assert [result.exit_code for result in results] == [0, 2, 0, 0, 0, 0, 3, 3, 2, 2]
    assert all(words[:5] == ["train", "--quiet", "--nproc", "2", question.recipe] for words in started)
    assert len(started) == 7 and sum("cannot go on" in text for text in said) == 1
    assert sum("not started: it continues" in text and "which failed" in text for text in said) == 2
    assert any(f"without a final validation loss; see {plan.folder_of(plan.runs[8])}" in text for text in said)
    run_ladder(plan, said.append)
    assert len(started) == 9, "finished runs are left alone"
    assert [run.name for run in read_ladder(plan.folder).runs] == [plan.runs[at].name for at in (0, 2, 3, 4, 5)]
    # A fork begins with the user's words of now: those for memory may be other ones than its trunk had.
    monkeypatch.setattr(trains, "fork_run", lambda *words, **more: None)
    now = plan_ladder(replace(question, words=(*question.words, "batch.micro_batch=1")))
    run_ladder(now, said.append)
    fork = next(words for words in started[9:] if now.words_of(now.runs[1])[-2] in words)
    recipe = load_recipe(fork[2], fork[3:])
    assert recipe == now.recipe_of(now.runs[1]) and recipe.batch.micro_batch == 1


def test_a_loss_that_is_not_finite_counts_as_missing(question: LadderQuestion, monkeypatch: pytest.MonkeyPatch):
    plan = plan_ladder(question)
    pretend(plan)
    last = plan.runs[-1]
    file = plan.folder_of(last) / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], json.dumps(line(last.steps, val_loss=float("nan"), seconds={}))]) + "\n")
    results = read_results(plan)
    assert results[-1].loss is None and results[-1].state == "nan"
    assert all(math.isfinite(loss) for _, loss in results[-1].curve)
    report = LadderReport(plan, tuple(results))
    record_results(plan, results)
    assert report.missing == [last.name] and len(read_ladder(plan.folder).runs) == 9
    assert " nan " in report.lines()[10]
    monkeypatch.setattr(trains, "run_hlat", lambda *words, **more: pytest.fail("it has been trained"))
    run_ladder(plan, lambda text: None)


def test_a_damaged_line_is_named_and_the_run_is_not_taken_for_one_that_has_not_begun(question: LadderQuestion):
    plan = plan_ladder(question)
    pretend(plan)
    file = plan.folder_of(plan.runs[0]) / "metrics.jsonl"
    file.write_text(file.read_text().replace("{", "", 1))
    with pytest.raises(DataError, match=r"metrics.jsonl, line 1: .* is not a JSON object"):
        read_results(plan)


def test_a_folder_with_another_run_is_refused(question: LadderQuestion):
    plan = plan_ladder(question)
    pretend(plan)
    words = (*question.words, "training.seed=4")
    (plan.folder / "design.json").unlink()
    other = plan_ladder(replace(question, words=words))
    for act in (read_results, lambda plan: run_ladder(plan, lambda text: None)):
        with pytest.raises(PlanError, match=rf"{plan.folder_of(plan.runs[0])}.*training\.seed is 4, and was 3"):
            act(other)


def test_a_moved_ladder_trains_where_it_is(question: LadderQuestion, tmp_path: Path):
    old = plan_ladder(question)
    old.folder.rename(tmp_path / "moved")
    plan = plan_ladder(replace(question, to=str(tmp_path / "moved")), found_only=True)
    for run in plan.runs:
        recipe = plan.recipe_of(run)
        assert recipe.run_dir == tmp_path / "moved" / run.name and recipe.prepared_dir == tmp_path / "moved" / "data"
    assert str(old.folder) not in (plan.folder / "design.json").read_text()


def test_an_element_of_the_job_array_trains_one_size(question: LadderQuestion):
    plan = plan_ladder(question)
    script, _ = array_script(trains.array_of_sizes(plan), ["run.device=cpu"], [], None, "ladder")
    assert "--array=0-2\n" in script and f"-m hlat ladder {question.recipe} run.device=cpu --to" in script
    assert script.endswith('--only "$SLURM_ARRAY_TASK_ID"\n')


def command(question: LadderQuestion, to: Path, *more: str) -> list[str]:
    options = ["--sizes", question.sizes, "--tokens", question.tokens, "--to", str(to), *more]
    return ["ladder", question.recipe, *question.words, *options]


@pytest.mark.slow
def test_a_ladder_killed_and_resumed_is_that_of_one_that_was_not(cli, question: LadderQuestion, tmp_path: Path):
    """And each fork has the loss of a run that is trained alone with its schedule: the law of wsd."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = cli(*command(question, whole))
    assert done.returncode == 0, done.stderr
    assert "forecast" in done.stdout and max(map(len, done.stdout.splitlines())) <= 120
    plan = plan_ladder(replace(question, to=str(whole)))

    python = [sys.executable, "-P", "-m", "hlat"]
    process = subprocess.Popen([*python, *command(question, broken)], start_new_session=True)
    fork = broken / plan.runs[1].name / "metrics.jsonl"
    while not fork.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in _processes_with(broken):  # runs are in groups of their own
        os.kill(pid, signal.SIGKILL)
    again = cli(*command(question, broken))
    assert again.returncode == 0, again.stderr
    assert read_ladder(broken) == read_ladder(whole), "the same bits of every loss"

    for run in plan.runs:
        if run.parent is not None:
            trunk = next(one for one in plan.runs if one.name == run.parent)
            alone = tmp_path / f"alone-{run.name}"
            words = [*question.words, *trunk.overrides, *run.overrides, f"run.dir={alone}"]
            assert cli("train", question.recipe, *words).returncode == 0
            last = json.loads((alone / "metrics.jsonl").read_text().splitlines()[-1])
            found = next(one for one in read_ladder(whole).runs if one.name == run.name)
            assert last["step"] == run.steps and last["val_loss"] == found.loss


def _processes_with(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:  # that process has ended
                continue
            if os.fsencode(folder) in words and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_budget_in_time_is_measured_and_kept_by_the_plan(cli, question: LadderQuestion, tmp_path: Path):
    """The plan keeps the budget. How long runs really take is the machine's affair, and not tested."""
    words = [*question.words, "--budget", "1h", "--sizes", "w8,w16,w24", "--to", str(tmp_path / "timed"), "--dry-run"]
    done = cli("ladder", question.recipe, *words, "--json")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert len(runs) == 16 and 0 < sum(run["seconds"] for run in runs) <= 3600
    assert not (tmp_path / "timed" / "design.json").exists(), "nothing is begun"
    assert not (tmp_path / "timed" / "probe").exists()


def test_a_written_ladder_is_read_as_it_was(question: LadderQuestion, tmp_path: Path):
    plan = plan_ladder(question)
    pretend(plan)
    found = LadderReport(plan, tuple(read_results(plan))).ladder
    assert isinstance(found, Ladder)
    write_ladder(tmp_path, found)
    assert read_ladder(tmp_path) == found
