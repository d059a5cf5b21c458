"""The registered forecast in reports: the band is the file's, interpolated by numpy; the sentences are the event's."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hlat.cli import app
from hlat.forecast import Forecast, LossRange, write_forecast
from hlat.reporting import read_overview, report_page, summary_markdown
from tests.support.reporting import curves, event, figures, line, resolved_recipe, write_lines, write_run

LOSS = "Loss of training and validation"
TOKENS = 200_000  # of the whole run; a step has 1,000
LENGTH = ("training.steps=200", "data.sequence_length=250", "batch.global_batch=4", "batch.micro_batch=4")
POINTS = ((0.1, LossRange(9.0, 8.0, 9.5)), (0.33, LossRange(7.0, 6.5, 8.0)), (1.0, LossRange(3.0, 2.8, 3.5)))


def write(folder: Path, steps: int, *, registered_at: int = 0) -> Path:
    """A run of so many of its 200 steps, with a forecast, and the event that has registered it."""
    folder.mkdir()
    write_forecast(folder, Forecast("abc", TOKENS, POINTS[-1][1], POINTS), datetime(2026, 3, 1, 12, tzinfo=UTC))
    sha256 = json.loads((folder / "forecast.json").read_text())["sha256"]
    events = [event("start", 0, step=0, parameters=1_000_000, changes=[], recipe=resolved_recipe(*LENGTH))]
    events += [event("forecast", 1, step=registered_at, ladder="abc", tokens=TOKENS, loss=3.0, low=2.8, high=3.5,
                     sha256=sha256)]  # fmt: skip
    lines = [line(step) for step in range(10, steps + 1, 10)]
    lines[-1] |= {"val_loss": 3.19, "val_bits_per_byte": 1.0}
    lines += [line(steps + 10)] if steps < 200 else []  # a run that goes on has logged more since its validation
    return write_run(folder, lines, events)


@pytest.mark.parametrize("steps", [120, 200])
def test_the_band_is_that_of_the_file_as_far_as_the_run_has_come(tmp_path: Path, steps: int) -> None:
    text = report_page([write(tmp_path / "run", steps)])
    content = json.loads((tmp_path / "run" / "forecast.json").read_text())["curve"]
    band = next(trace for trace in figures(text)[LOSS]["data"] if trace.get("fill") == "toself")
    assert figures(text)[LOSS]["data"][0] is not None and figures(text)[LOSS]["data"][0]["fill"] == "toself", "below"
    half = len(band["y"]) // 2
    fractions = np.array(band["places"][0][:half]) / TOKENS
    assert fractions[0] == pytest.approx(0.1) and fractions[-1] == pytest.approx(min(1, (steps + 10) / 200))
    wanted = {
        name: np.interp(fractions, *([each[key] for each in content] for key in ("fraction", name)))
        for name in ("loss", "low", "high")
    }
    # Six digits are written.
    assert band["y"][:half] == pytest.approx(wanted["low"], rel=1e-5)
    assert band["y"][half:][::-1] == pytest.approx(wanted["high"], rel=1e-5)
    assert curves(text, LOSS)["forecast"]["y"] == pytest.approx(wanted["loss"], rel=1e-5)
    # On the axis of steps, a step is 1,000 tokens.
    assert band["places"][1] == pytest.approx([tokens / 1000 for tokens in band["places"][0]], rel=1e-5)


def test_sentences_have_forecast_and_actual_loss(tmp_path: Path) -> None:
    ended, going = write(tmp_path / "ended", 200), write(tmp_path / "going", 50, registered_at=7)
    said = "forecast 3.000 (2.800 to 3.500, by ladder abc, written 2026-03-01 12:00:01 UTC"
    assert f"Validation loss at the end: {said}); actual 3.190." in report_page([ended])
    assert read_overview(ended).forecast == f"validation loss at the end: {said}); actual 3.190"
    assert read_overview(going).forecast.endswith("UTC, after 7 steps); 3.190 after 25% of the tokens")
    assert said in summary_markdown([ended])
    shown = CliRunner().invoke(app, ["show", str(ended)])
    assert f"{said}); actual 3.190" in " ".join(shown.output.split())
    compared = report_page([ended, going])
    assert "fill" not in compared.partition(LOSS)[2].partition("</script>")[0], "bands of several runs would overlap"


def test_a_run_of_another_length_is_not_compared(tmp_path: Path) -> None:
    """Twice as long, and past the end of the forecast: its loss there is none that was forecast."""
    run = write(tmp_path / "run", 200)
    longer = event("resume", 9, step=100, changes=[], recipe=resolved_recipe(*LENGTH, "training.steps=400"))
    write_lines(run / "events.jsonl", [*map(json.loads, (run / "events.jsonl").read_text().splitlines()), longer])
    text = report_page([run])
    said = "of a run of 200,000 tokens, and this one now has 400,000"
    assert f"The forecast is not shown: it is {said}." in text and '"fill":"toself"' not in text
    assert read_overview(run).forecast.endswith(f"; {said})") and f"; {said}" in summary_markdown([run])


def test_a_run_without_a_forecast_says_nothing_of_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(10), line(20)])
    text = (report_page([run]) + summary_markdown([run])).replace("anomalies.forecast", "")  # a field of the recipe
    assert "orecast" not in text and read_overview(run).forecast == ""


@pytest.mark.parametrize("change", ["edited", "another", "damaged"])
def test_a_forecast_that_was_changed_is_not_drawn(tmp_path: Path, change: str) -> None:
    run = write(tmp_path / "run", 100)
    file = run / "forecast.json"
    if change == "another":
        file.unlink()
        write_forecast(run, Forecast("xyz", TOKENS, POINTS[-1][1], POINTS), datetime(2026, 3, 1, tzinfo=UTC))
    else:
        file.write_text(file.read_text().replace("9.5", "9.9") if change == "edited" else "{")
    text = report_page([run])
    assert "The forecast is not shown: " in text and '"fill":"toself"' not in text


def test_a_forecast_of_which_nothing_is_reached_yet_is_no_fault(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 10)
    assert '"fill":"toself"' not in report_page([run])
    write_lines(run / "metrics.jsonl", [])
    assert "forecast 3.000" in report_page([run])
