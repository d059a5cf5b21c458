"""Records of ladders, the count of sizes they choose, and the curves they forecast."""

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from hlat.forecast import LADDER_FILE, Ladder, LadderRun, read_forecast, read_ladder, write_forecast, write_ladder
from hlat.forecast.ladder import SizeKind
from hlat.runtime.errors import PlanError
from tests.forecast.ladders import LAW, ladder_of, observations


def sizes(value: float) -> dict[SizeKind, float]:
    return {"total": value, "non_embedding": value, "flops": value}


def test_a_ladder_is_read_as_it_was_written(tmp_path: Path) -> None:
    ladder = ladder_of(observations(noise=0.003, shared=0.001))
    write_ladder(tmp_path, ladder)
    assert read_ladder(tmp_path) == ladder and read_ladder(tmp_path).id == ladder.id


def test_an_edited_ladder_is_refused(tmp_path: Path) -> None:
    write_ladder(tmp_path, ladder_of(observations()))
    content = json.loads((tmp_path / LADDER_FILE).read_text())
    content["runs"][0]["loss"] -= 0.1
    (tmp_path / LADDER_FILE).write_text(json.dumps(content))
    with pytest.raises(PlanError, match="was edited"):
        read_ladder(tmp_path)
    (tmp_path / LADDER_FILE).write_text(json.dumps({"runs": [], "conditions": {}}))
    with pytest.raises(PlanError, match="it lacks 'id'"):
        read_ladder(tmp_path)


def test_a_forecast_goes_through_its_file(tmp_path: Path) -> None:
    forecast = ladder_of(observations(noise=0.003)).forecast(sizes(3e9), 10**12)
    assert forecast.warnings and "times the FLOPs of the ladder's largest run" in forecast.warnings[0]
    write_forecast(tmp_path, forecast, datetime(2026, 11, 29, tzinfo=UTC))
    found = read_forecast(tmp_path)
    assert found is not None
    assert (found.curve, found.warnings, found.kind) == (forecast.curve, forecast.warnings, forecast.kind)


def test_fewer_tokens_per_parameter_than_the_ladder_has_are_told() -> None:
    ladder = ladder_of(observations(noise=0.003))  # 1e8 tokens for 1.5e8 parameters: 0.67
    (warning,) = ladder.forecast(sizes(3e8), 10**8).warnings
    assert "0.33 tokens per parameter, and runs of the ladder at least 0.67" in warning
    assert ladder.forecast(sizes(3e8), 2 * 10**8).warnings == ()


@pytest.mark.parametrize("kind", ["total", "non_embedding", "flops"])
def test_the_count_of_sizes_is_the_one_that_the_law_is_of(kind: SizeKind) -> None:
    """Losses of a law of one count, in models whose embedding is as large as the smallest of them."""
    ladder = ladder_of(observations(), embedding=1e7)
    runs = tuple(replace(run, loss=LAW.loss(run.sizes[kind], run.tokens)) for run in ladder.runs)
    assert Ladder(runs, {}).kind == kind


@pytest.mark.parametrize("fraction, decay", [(0.5, 0.1), (0.95, 0.02)])
def test_a_curve_has_the_shape_of_the_runs(fraction: float, decay: float) -> None:
    forecast = ladder_of(observations(noise=0.001), decay).forecast(sizes(1e9), 2 * 10**10)
    curve = dict(forecast.curve)
    found = next(loss for at, loss in curve.items() if at == pytest.approx(fraction))
    assert found.loss == pytest.approx(forecast.end.loss * fraction**-decay, rel=1e-3)
    assert found.low < found.loss < found.high and curve[1.0] == forecast.end


def test_a_shape_that_changes_with_the_size_is_followed() -> None:
    """log(loss(t) / loss(1)) = -(0.1 + 0.01 log(N / 5e6)) log(t): at N = 1e9 that is -0.153 log(t)."""
    ladder = ladder_of(observations())

    def bent(run: LadderRun) -> LadderRun:
        decay = 0.1 + 0.01 * math.log(run.sizes["total"] / 5e6)
        return replace(run, curve=tuple((t, run.loss * t**-decay) for t, _ in run.curve))

    runs = tuple(map(bent, ladder.runs))
    forecast = Ladder(runs, {}).forecast(sizes(1e9), 2 * 10**10)
    found = next(loss.loss for at, loss in forecast.curve if at == pytest.approx(0.2))
    # What is expected of slopes, none, moves them by a few percent.
    assert math.log(found / forecast.end.loss) == pytest.approx(-0.153 * math.log(0.2), rel=0.05)


def test_a_curve_falls_and_is_finite_even_where_validations_rise() -> None:
    ladder = ladder_of(observations(noise=0.003))
    runs = tuple(
        replace(run, curve=((0.1, 0.9 * run.loss), (0.5, 0.8 * run.loss), (1.0, run.loss))) for run in ladder.runs
    )
    curve = np.array([loss for _, loss in Ladder(runs, {}).forecast(sizes(1e9), 10**10).curve])
    assert np.isfinite(curve).all() and (np.diff(curve, axis=0) <= 0).all()


def test_runs_without_validations_on_the_way_give_a_forecast_of_the_end() -> None:
    ladder = ladder_of(observations(noise=0.003))
    runs = tuple(replace(run, curve=((1.0, run.loss),)) for run in ladder.runs)
    forecast = Ladder(runs, {}).forecast(sizes(1e9), 10**10)
    assert forecast.curve == ((1.0, forecast.end),)
