"""Accuracies of tasks that a ladder forecasts: planted lines and sigmoids, and what is left out."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from hlat.forecast import (
    FORECAST_FILE,
    Forecast,
    Ladder,
    LadderRun,
    LossRange,
    forecast_json,
    read_forecast,
    read_ladder,
    write_forecast,
    write_ladder,
)
from hlat.forecast.tasks import fit_tasks
from tests.forecast.ladders import ladder_of, observations

Scored = list[tuple[float, dict[str, float]]]


def accuracy(bits: float | np.ndarray, low: float = 0.25, steepness: float = 5.0, middle: float = 0.9) -> np.ndarray:
    return np.asarray(low + (1 - low) / (1 + np.exp(steepness * (bits - middle))))


def scored(losses: np.ndarray, noise: float = 0.0, seed: int = 0, **planted: float) -> Scored:
    """Runs whose bits are 0.1 + 0.33 loss, and whose accuracies are the planted ones of these bits."""
    draw = np.random.default_rng(seed)
    bits = 0.1 + 0.33 * losses + noise * draw.normal(size=len(losses))
    values = np.clip(accuracy(bits, **planted) + noise * draw.normal(size=len(losses)), 0, 1)
    return [
        (loss, {"arc/bits_per_byte": b, "arc/acc": a})
        for loss, b, a in zip(losses.tolist(), bits.tolist(), values.tolist(), strict=True)
    ]


@pytest.mark.parametrize("low, steepness, middle", [(0.25, 5.0, 0.9), (0.5, 4.0, 1.1)])
def test_a_planted_line_and_sigmoid_are_found(low: float, steepness: float, middle: float) -> None:
    fits, left_out = fit_tasks(scored(np.linspace(3.2, 4.6, 9), low=low, steepness=steepness, middle=middle))
    assert not left_out
    for loss in (2.2, 2.8, 3.5):
        value, lowest, highest = fits["arc"].accuracy(loss, np.full(200, loss))
        # An accuracy's noise counts as 1e-6 at least, which an extrapolation multiplies by some tens.
        wanted = float(accuracy(0.1 + 0.33 * loss, low, steepness, middle))
        assert value == pytest.approx(wanted, abs=1e-6) and highest - lowest < 1e-4


def test_the_best_fit_is_that_of_a_grid_search() -> None:
    """Thirty runs over the whole sigmoid, whose constants they determine: what is expected hardly counts."""
    losses = np.linspace(0.5, 4.6, 30)
    runs = scored(losses, 0.01, seed=3)
    bits, found = (np.array([scores[f"arc/{name}"] for _, scores in runs]) for name in ("bits_per_byte", "acc"))
    grid = np.meshgrid(np.linspace(0.15, 0.35, 41), np.linspace(4, 6, 41), np.linspace(0.8, 1.0, 41), indexing="ij")
    lows, steep, middles = (axis.reshape(-1, 1) for axis in grid)
    squares = ((lows + (1 - lows) / (1 + np.exp(steep * (bits - middles))) - found) ** 2).sum(axis=1)
    constants = [float(axis[np.argmin(squares)]) for axis in (lows[:, 0], steep[:, 0], middles[:, 0])]
    slope, start = np.polyfit(losses, bits, 1)
    fit = fit_tasks(runs)[0]["arc"]
    for loss in losses:
        # A step of the grid is 0.005 in both ends: an accuracy is as near as that.
        wanted = float(accuracy(start + slope * loss, *constants))
        assert fit.accuracy(loss, np.full(200, loss))[0] == pytest.approx(wanted, abs=0.005)


def test_an_accuracy_of_zero_counts_and_ranges_stay_between_0_and_1() -> None:
    runs = scored(np.linspace(1.0, 4.6, 8), 0.05, low=0.0, steepness=6.0, middle=1.0)
    runs.append((9.0, {"arc/bits_per_byte": 3.07, "arc/acc": 0.0}))
    fits, left_out = fit_tasks([*runs[:4], runs[-1]])
    assert not left_out, "five runs, one of them with an accuracy of 0"
    for loss in (0.01, 2.0, 12.0):
        value, low, high = fits["arc"].accuracy(loss, np.full(200, loss))
        assert 0 <= low <= value <= high <= 1


def test_tasks_at_chance_or_of_few_runs_are_left_out_with_the_reason() -> None:
    draw = np.random.default_rng(5)
    runs = scored(np.linspace(3.2, 4.6, 8))
    for number, (_, scores) in enumerate(runs):
        scores |= {"coin/bits_per_byte": scores["arc/bits_per_byte"], "coin/acc": 0.5 + 0.01 * draw.normal()}
        scores |= {"same/bits_per_byte": 1.0, "same/acc": 0.25, "gold/bits_per_byte": 1.0}
        if number < 4:
            scores |= {"few/bits_per_byte": 1.0, "few/acc": 0.4 - 0.01 * number}
    fits, left_out = fit_tasks(runs)
    assert list(fits) == ["arc"] and len(left_out) == 2
    assert "fewer than 5 runs: few" in left_out[0] and "does not rise as the loss falls: coin, same" in left_out[1]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [5, 12])
def test_ranges_hold_four_of_five_runs(runs: int) -> None:
    """A share of 0.8 of 150 has a standard deviation of 0.033; three of them are allowed."""
    held = []
    for seed in range(150):
        draw = np.random.default_rng(1000 + seed)
        planted = {"low": draw.uniform(0.2, 0.5), "steepness": draw.uniform(3, 6), "middle": draw.uniform(0.8, 1.2)}
        fits, _ = fit_tasks(scored(np.linspace(3.3, 4.6, runs), 0.01, seed, **planted))
        if "arc" in fits:
            _, low, high = fits["arc"].accuracy(2.6, np.full(200, 2.6))
            bits = 0.1 + 0.33 * 2.6 + 0.01 * draw.normal()
            held.append(low <= accuracy(bits, **planted) + 0.01 * draw.normal() <= high)
    assert len(held) > 100 and np.mean(held) == pytest.approx(0.8, abs=0.1)


def ladder_with_scores() -> Ladder:
    ladder = ladder_of(observations(noise=0.003))
    return replace(
        ladder, runs=tuple(replace(run, scores=scored(np.array([run.loss]), low=0.2)[0][1]) for run in ladder.runs)
    )


def test_a_ladder_and_its_forecast_keep_tasks_in_their_files(tmp_path: Path) -> None:
    ladder = ladder_with_scores()
    write_ladder(tmp_path, ladder)
    assert read_ladder(tmp_path) == ladder and ladder.id != ladder_of(observations(noise=0.003)).id
    forecast = ladder.forecast({"total": 1e9, "non_embedding": 1e9, "flops": 1e9}, 2 * 10**10)
    value, low, high = forecast.tasks["arc"]
    assert value == pytest.approx(float(accuracy(0.1 + 0.33 * forecast.end.loss, 0.2)), abs=1e-5)
    # Without noise of the task, the range of the accuracy is that of the loss, but for quantiles between two draws.
    ends = [float(accuracy(0.1 + 0.33 * loss, 0.2)) for loss in (forecast.end.high, forecast.end.low)]
    assert [low, high] == pytest.approx(ends, abs=1e-3) and low < value < high
    write_forecast(tmp_path, forecast, datetime(2026, 11, 29, tzinfo=UTC))
    found = read_forecast(tmp_path)
    assert found is not None and found.tasks == forecast.tasks
    write_forecast(tmp_path, forecast, datetime(2026, 11, 30, tzinfo=UTC))  # the same one
    assert "tasks" in json.loads((tmp_path / FORECAST_FILE).read_text())


def test_files_without_tasks_keep_their_hashes() -> None:
    """Hashes as they were before there were tasks."""
    run = LadderRun("a", {"total": 3.0}, 5, 2.5, ((1.0, 2.5),))
    assert Ladder((run,), {"data.path": "x"}).id == "32c968220e709cad"
    forecast = Forecast("0123456789abcdef", 10**9, LossRange(3.0, 2.9, 3.1), ((1.0, LossRange(3.0, 2.9, 3.1)),))
    assert forecast_json(forecast)["sha256"] == "1799c1707744187a25997afaee286a3b127651e4978611bf31ab9f819e8f84b0"
