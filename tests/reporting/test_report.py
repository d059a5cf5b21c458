"""The report shows what is in the files of a run: curves, times, verdicts, recipe, mixture, plan and dollars."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hlat.cli import app
from hlat.data.samples.order import Mixture, phase_weights
from hlat.reporting import Machines, report_page, summary_markdown, write_report
from hlat.reporting.run_record import active_seconds, read_run, wall_seconds
from hlat.runtime.errors import DataError, HardwareError, PlanError, StorageError
from tests.support.reporting import curves, event, figures, line, resolved_recipe, write_lines, write_run

LOSS = "Loss of training and validation"


def cells(text: str, caption: str) -> list[list[str]]:
    """Rows of a table."""
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    (found,) = [each for each in tables if f"<caption>{caption}</caption>" in each]
    rows = re.findall(r"<tr.*?</tr>", found, re.DOTALL)
    return [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 lines that was restarted once, with validation sets, a task, an anomaly and goodput."""
    lines = [line(step) for step in range(10, 101, 10)]
    lines[4] |= {"val_loss": 7.5, "val_bits_per_byte": 2.5, "val/books/loss": 7.25, "task/arc/accuracy": 0.25}
    lines[9] |= {"val_loss": 6.5, "val_bits_per_byte": 2.1, "val/books/loss": 6.25, "task/arc/accuracy": 0.5}
    recipe = resolved_recipe()
    events = [
        event("start", 0, step=0, parameters=1_000_000, processes=4, device="a device", changes=[], recipe=recipe),
        event("checkpoint", 100, step=50, path="x", seconds=1.5, stall_seconds=0.1, tries=1),
        event("incident", 130, rank=1, step=57, kind="signal", cause="SIGKILL", restart=True, decision="progress"),
        event("goodput", 131, attempts=1, final=False, seconds={"productive": 90.0, "lost": 30.0}),
        event("resume", 140, step=50, parameters=1_000_000, changes=[{"path": "a.b", "old": 1, "new": 2}],
              recipe=recipe, processes=4, device="a device"),
        event("anomaly", 200, step=80, kind="loss_spike", action="skip", loss=20.5, grad_norm=9.0, reason="high"),
        event("end", 245, step=100, reason="finished"),
        event("goodput", 250, attempts=2, final=True, seconds={"productive": 200.0, "lost": 30.0, "saving": 20.0}),
    ]  # fmt: skip
    return write_run(tmp_path / "run", lines, events)


def test_curves_are_the_logged_values(run):
    text = report_page([run])
    loss = curves(text, LOSS)
    assert figures(text)[LOSS]["axes"] == ["tokens", "step", "wall time, min"]
    assert loss["training"]["places"][:2] == [[scale * n for n in range(1, 11)] for scale in (10_000.0, 10.0)]
    assert loss["training"]["y"] == pytest.approx([8.0 - n / 5 for n in range(1, 11)])
    assert loss["validation"]["y"] == [7.5, 6.5] and loss["validation"]["places"][0] == [50_000.0, 100_000.0]
    assert loss["books"]["y"] == [7.25, 6.25]
    assert curves(text, "Tasks: accuracy")["arc"]["y"] == [0.25, 0.5]
    assert curves(text, "Peak memory")["peak memory"]["y"] == [3.0] * 10
    assert curves(text, "MFU")["attention counted as causal"]["y"] == pytest.approx([40.0] * 10)
    assert curves(text, "Time of a step by phase")["backward"]["y"] == pytest.approx([1.4] * 10)


def test_wall_time_counts_the_time_between_attempts(run):
    """Lines of 20 s: five in the first attempt, five from 140 s on."""
    record = read_run(run)
    assert wall_seconds(record).tolist() == [20, 40, 60, 80, 100, 160, 180, 200, 220, 240]
    assert active_seconds(record) == pytest.approx(131 + 110), "from each start to its last event"
    assert curves(report_page([run]), LOSS)["training"]["places"][2] == pytest.approx(
        [n / 60 for n in wall_seconds(record)],
        rel=1e-5,  # six digits are written
    )


def test_a_clock_that_was_set_back_makes_no_time_negative(tmp_path):
    """The second start is recorded 60 s before the end of the first attempt."""
    events = [event("start", 0, step=0), event("incident", 100, step=50), event("resume", 40, step=50)]
    record = read_run(write_run(tmp_path / "run", [line(step) for step in range(10, 101, 10)], events))
    assert wall_seconds(record).tolist() == [20, 40, 60, 80, 100, 100, 100, 100, 120, 140]
    assert active_seconds(record) == 100 + 100
    events = [event("start", 0, step=0), event("incident", -50, step=50)]
    assert active_seconds(read_run(write_run(tmp_path / "other", [line(10)], events))) == 20
    assert active_seconds(read_run(write_run(tmp_path / "third", [], events))) == 0


def test_steps_after_a_rollback_are_at_the_time_when_they_were_repeated(tmp_path):
    """From step 50, 100 s after the start, back to step 30: its lines are those of the second time."""
    events = [event("start", 0, step=0), event("rollback", 120, step=30)]
    record = read_run(write_run(tmp_path / "run", [line(step) for step in range(10, 51, 10)], events))
    assert wall_seconds(record).tolist() == [20, 40, 60, 140, 160] and active_seconds(record) == 160


def test_time_after_the_last_event_of_an_attempt_counts(tmp_path):
    """An attempt that was killed at step 30, and one that is running: neither has recorded an end."""
    events = [event("start", 0, step=0), event("checkpoint", 41, step=20), event("resume", 500, step=30)]
    events += [event("checkpoint", 530, step=40)]
    record = read_run(write_run(tmp_path / "run", [line(step) for step in range(10, 71, 10)], events))
    assert wall_seconds(record).tolist() == [20, 40, 60, 520, 540, 560, 580]
    assert active_seconds(record) == 60 + 80
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert active_seconds(read_run(tmp_path / "run")) == 41 + 30, "the events, where no step is logged"


def test_wall_time_without_events_is_the_time_of_the_steps(tmp_path):
    record = read_run(write_run(tmp_path / "run", [line(10), line(20)], []))
    assert wall_seconds(record).tolist() == [20, 40] and active_seconds(record) == 40


def test_what_happened_is_listed(run):
    text = report_page([run])
    happened = [row[2] for row in cells(text, "Checkpoints and anomalies in a row are one line")]
    assert happened[1:] == [
        "Started on 4 × a device",
        "Checkpoint, written in 1.5 s",
        "Rank 1: SIGKILL; restarted",
        "Resumed from step 50 on 4 × a device, with a.b: 1 -&gt; 2",
        "Loss spike, step skipped: loss 20.5; gradient norm 9; high",
        "Ended: finished",
    ]
    events = cells(text, "Events")
    assert [row[0] for row in events[1:4]] == ["start", "checkpoint", "incident"] and "cause: SIGKILL" in events[3][3]
    assert "changes: a.b: 1 -&gt; 2" in events[5][3], "not as Python writes it"
    assert "Goodput: 80.0% of the time in useful steps" in text, "200 of 250 s: the last account of the command"
    assert ["a.b", "50", "1", "2"] in cells(text, "Changes of the recipe while resuming")
    names = [trace["name"] for trace in figures(text)[LOSS]["data"]]
    assert names[-3:] == ["checkpoint (1)", "restart (1)", "anomaly (1)"]
    attempts = {trace["name"]: trace for trace in figures(text)["Attempts"]["data"]}
    assert attempts["running"]["y"] == ["attempt 1", "attempt 2"]
    assert attempts["running"]["x"] == pytest.approx([131 / 60, 110 / 60], rel=1e-5)
    assert ["training.steps", "100"] in cells(text, "Resolved recipe")


def test_plan_and_dollars_stand_beside_what_was_measured(run):
    """A p5.48xlarge of 8 GPUs: 241 s of it, and none left after 100 of 100 steps."""
    recipe = resolved_recipe("batch.global_batch=64", "batch.micro_batch=1")
    write_lines(run / "events.jsonl", [event("start", 0, step=0, recipe=recipe), event("end", 241, step=100)])
    text = report_page([run], Machines("p5.48xlarge:1"))
    price = float(re.search(r"p5.48xlarge:1, \$([\d.]+) per hour", text)[1])
    rows = {row[0]: row[1:] for row in cells(text, "Plan beside actual")}
    assert float(rows["USD so far"][1].removeprefix("$")) == pytest.approx(241 / 3600 * price, abs=0.01)
    assert rows["peak memory of a device"][1] == "3.00 GiB" and rows["peak memory of a device"][0].endswith("GiB")
    assert rows["tokens per second"][1] == "500" and rows["time of a step"][0]
    assert " to $" in rows["USD of the whole run"][0]


def test_a_layout_that_the_machines_cannot_have_is_a_sentence(run):
    assert "The plan cannot be made: " in report_page([run], Machines("h100:3"))
    with pytest.raises(HardwareError, match="nowhere"):
        report_page([run], Machines("nowhere:1"))
    with pytest.raises(PlanError, match="--price gold"):
        report_page([run], Machines("p5.48xlarge:1", "gold"))


def test_the_mixture_delivered_is_that_of_the_formula(tmp_path):
    sources = '[{"path": "a", "name": "books", "weight": 3}, {"path": "b", "name": "<script>", "weight": 1}]'
    recipe = resolved_recipe(f"data.sources={sources}", "data.path=null")
    events = [event("start", 0, step=0, recipe=recipe)]
    text = report_page([write_run(tmp_path / "run", [line(10, samples=41)], events)])
    rows = cells(text, "Data mixture, asked and delivered")
    counts = Mixture(phase_weights(read_run(tmp_path / "run").recipe.data)).counts(41)
    assert rows[1] == ["books", "75.000%", f"{counts[0] / 41:.3%}", f"{counts[0] * 256:,}"]
    assert rows[2][0] == "&lt;script&gt;"


def test_a_killed_run_is_readable_up_to_the_line_that_was_being_written(tmp_path):
    run = write_run(tmp_path / "run", [line(10), line(20)])
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 30, "tok')
    text = report_page([run])
    assert curves(text, LOSS)["training"]["places"][0] == [10_000.0, 20_000.0]
    assert "<dd>killed<small>no process is training in its folder</small></dd>" in text


def test_a_run_without_a_step_has_a_page_that_says_so(tmp_path):
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    text = report_page([run])
    assert "No step has been logged yet." in text and "<figure" not in text and len(text) < 100_000, "no Plotly"


def test_several_runs_lie_over_each_other_with_the_diff_of_their_recipes(tmp_path):
    runs = []
    for name, rate in (("one", 0.001), ("two", 0.002)):
        recipe = resolved_recipe(f"run.name={name}", f"optimizer.lr={rate}")
        runs.append(write_run(tmp_path / name, [line(10), line(20)], [event("start", 0, step=0, recipe=recipe)]))
    text = report_page(runs)
    assert list(curves(text, LOSS)) == ["one: training", "two: training"]
    assert cells(text, "Fields in which the recipes differ")[1:] == [["optimizer.lr", "0.001", "0.002"]]
    assert [row[0] for row in cells(text, "Runs; the least loss is marked")] == ["run", "one", "two"]
    assert text.index("What differs") < text.index(LOSS)


def test_metrics_that_no_chart_knows_have_charts_of_their_own(tmp_path):
    text = report_page([write_run(tmp_path / "run", [line(step, entropy=step / 7) for step in (10, 20, 30)])])
    assert curves(text, "entropy")["entropy"]["y"] == pytest.approx([10 / 7, 20 / 7, 30 / 7], rel=1e-5)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(DataError, match="is not the folder of a run"):
        report_page([tmp_path])
    run = write_run(tmp_path / "run", [line(10)])
    with pytest.raises(StorageError, match="Name another file with -o FILE"):
        write_report([run], tmp_path / "missing" / "report.html")
    (run / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        write_report([run])
    assert sorted(path.name for path in run.iterdir()) == ["events.jsonl", "metrics.jsonl"], "nothing half-written"


def test_a_long_run_is_a_small_page_with_its_spike(tmp_path):
    """The law at 20,000 lines; benchmarks/run_report.py has 200,000."""
    lines = [line(step) for step in range(1, 20_001)]
    lines[12_345]["loss"] = 55.0
    text = report_page([write_run(tmp_path / "run", lines)])
    assert len(text) < 6_000_000 and np.max(curves(text, LOSS)["training"]["y"]) == 55.0


def test_the_headline_has_the_last_numbers_and_leaves_out_what_is_unknown(run, tmp_path):
    def headline(text):
        return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))

    found = headline(report_page([run], Machines("p5.48xlarge:1")))
    assert found["State"] == "finished" and found["Model"].startswith("1M") and found["Loss"].startswith("6<")
    assert found["Tokens"] == "100,000<small>step 100 of 100</small>"
    assert found["Validation loss"] == "6.5<small>2.1 bits per byte</small>"
    assert found["Time"] == "4.0 min<small>4 × a device</small>"
    assert found["Goodput"] == "80%<small>of the time in useful steps, 1 restart</small>"
    assert found["Cost"].startswith("$") and "per hour" in found["Cost"]
    bare = report_page([write_run(tmp_path / "bare", [line(10)])])
    assert not {"Cost", "Goodput", "Validation loss"} & set(headline(bare))
    # Parts without contents have no heading either.
    for absent in ("No task", "Samples of text", "Evaluation", "Checkpoints in the folder", "Plan and cost"):
        assert absent not in re.sub(r"<script>.*?</script>", "", bare, flags=re.DOTALL), absent


def test_a_paragraph_of_markdown_has_the_numbers_and_no_markup_of_the_run(run, tmp_path):
    words = summary_markdown([run], Machines("p5.48xlarge:1"))
    assert words.startswith("**books**: finished; 1M parameters, 100,000 tokens (step 100 of 100), loss 6, ")
    for part in (
        "validation loss 6.5 (2.1 bits per byte)",
        "500 tok/s, MFU 40.0%",
        "goodput 80% (of the time in useful steps, 1 restart)",
        "cost $",
    ):
        assert part in words
    done = CliRunner().invoke(app, ["report", str(run), "--markdown"])
    assert done.exit_code == 0 and done.stdout == summary_markdown([run]) + "\n" and not (run / "report.html").exists()
    recipe = resolved_recipe()
    recipe["run"]["name"] = "[x](http://a) <img> **b**\n# c"
    other = write_run(tmp_path / "other", [line(10)], [event("start", 0, step=0, recipe=recipe)])
    assert r"**\[x\](http://a) \<img\> \*\*b\*\* \# c**" in summary_markdown([run, other])


def test_samples_of_a_prompt_stand_side_by_side_from_the_first_step_to_the_last(run):
    samples = [{"step": step, "prompt": "Once", "text": f" upon {step}"} for step in range(10, 101, 10)]
    write_lines(run / "samples.jsonl", samples)
    assert re.findall(r"<pre[^>]*>\s*upon (\d+)</pre>", report_page([run])) == ["10", "50", "100"]


def test_names_of_validation_sets_lose_the_folder_that_all_of_them_share(tmp_path):
    more = {f"val/sources/_usr_lib_python3.11_{name}/loss": 3.0 for name in ("*.py", "json_**_*.py")}
    texts = report_page([write_run(tmp_path / "long", [line(10, **more), line(20, **more)])])
    assert set(curves(texts, LOSS)) == {"training", "*.py", "json_**_*.py"}


def test_curves_of_one_metric_come_before_the_next_metric(tmp_path):
    more = {f"val/s{n:02}/loss": 3.0 for n in range(20)} | {"val_loss": 3.0}
    runs = [write_run(tmp_path / name, [line(10, **more), line(20, **more)]) for name in ("one", "two", "three")]
    shown = [name for name, curve in curves(report_page(runs), LOSS).items() if curve["visible"]]
    assert [name.rpartition(" ")[2] for name in shown] == ["training"] * 3 + ["validation"] * 3


def test_of_forty_sources_twelve_curves_are_drawn_and_all_can_be_chosen(tmp_path):
    more = {f"val/s{n:02}/loss": 3.0 + n for n in range(40)}
    text = report_page([write_run(tmp_path / "run", [line(10, **more), line(20, **more)])])
    found = curves(text, LOSS)
    drawn = [name for name, curve in found.items() if curve["visible"]]
    assert len(found) == 41 and drawn == ["training", "s39"], "a dozen curves would cover that of training"
    by_set = curves(text, "Loss of validation sets")
    drawn = [name for name, curve in by_set.items() if curve["visible"]]
    assert len(by_set) == 40 and drawn == [f"s{n}" for n in range(39, 27, -1)]
    assert set(re.findall(r'data-name="(.*?)"', text)) >= set(drawn) and 'data-name="s05"' not in text
