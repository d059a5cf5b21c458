"""One run and several as text: what they show is what the files have, and damage is left out and counted."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import hlat
from hlat.reporting import compare_runs, read_overview, sparkline
from hlat.runtime.errors import DataError
from tests.support.commands import hlat as command
from tests.support.reporting import event, line, resolved_recipe, write_run


def begun(*overrides: str) -> dict[str, object]:
    recipe = resolved_recipe(*overrides)
    return event("start", 0, step=0, parameters=1_000_000, processes=1, device="cpu", recipe=recipe)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs with other learning rates and other log intervals."""
    first = [line(step, loss=5.0 - step / 100) for step in range(10, 101, 10)]
    second = [line(step, loss=4.0 - step / 200) for step in range(25, 151, 25)]
    second[-1] |= {"val_loss": 3.5, "val_bits_per_byte": 1.5, "val/code/loss": 2.5}
    return [
        write_run(tmp_path / "a", first, [begun(), event("end", 9, step=100, reason="finished")]),
        write_run(tmp_path / "b", second, [begun("optimizer.lr=0.5", "run.name=other")]),
    ]


def test_a_run_shows_its_last_numbers_curve_and_recipe(runs: list[Path]) -> None:
    found = hlat.show_run(runs[1])
    assert (found.name, found.parameters, found.status.state) == ("other", 1_000_000, "killed")
    assert found.numbers["loss"] == 4.0 - 150 / 200 and found.numbers["tokens"] == 150_000
    assert found.validation == {"validation": 3.5, "code": 2.5}
    assert list(found.loss) == [(1000.0 * step, 4.0 - step / 200) for step in range(25, 151, 25)]
    assert list(found.loss[-2:]) == list(found.loss)[-2:] and found.loss[-1] in found.loss
    said = command("show", runs[1]).stdout
    assert "other: killed" in said and "1,000,000 parameters" in said and "optimizer.lr = 0.5" in said
    assert "code loss" in said and "█" in said and "▁" in said
    assert json.loads(command("show", runs[1], "--json").stdout) == json.loads(json.dumps(found.to_dict()))


def test_what_is_shown_of_a_run_fits_a_screen_however_often_it_was_started(runs: list[Path]) -> None:
    """The last three attempts are shown, and of the recipe what is no default; ``-v`` lists all."""
    attempts = runs[1] / "attempts.jsonl"
    for count in (3, 300):
        attempts.write_text(
            "".join(json.dumps({"time": f"2026-01-01T00:00:{n:04}", "host": n}) + "\n" for n in range(count))
        )
        said, every = command("show", runs[1]).stdout, command("show", runs[1], "-v").stdout
        assert said.count("attempt ") == 3 and f"attempt {count}, " in said and every.count("attempt ") == count
        assert ("attempts: 300, of which the last 3" in said) == (count == 300)
        assert all(len(line) <= 80 for line in said.splitlines() if str(runs[1]) not in line)
        assert "optimizer.lr = 0.5" in said and "optimizer.eps" not in said and "optimizer.eps" in every


def test_curves_are_compared_where_both_runs_have_logged(runs: list[Path]) -> None:
    found = compare_runs(runs)
    assert list(found.recipe) == ["optimizer.lr"] and found.recipe["optimizer.lr"][1] == "0.5"
    both = [dict(read_overview(run).loss) for run in runs]
    common = sorted(both[0].keys() & both[1].keys())
    assert common == [50_000, 100_000]
    assert found.curve == [(tokens, [each[tokens] for each in both], [False, False]) for tokens in common]
    said = command("compare", *runs).stdout
    assert "optimizer.lr" in said and "100,000" in said and "finished" in said and "~" not in said
    assert json.loads(command("compare", *runs, "--json").stdout) == json.loads(json.dumps(found.to_dict()))


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 100])
def test_a_comparison_has_at_most_eight_rows_and_ends_at_the_end_of_the_shorter_run(tmp_path: Path, steps: int) -> None:
    runs = [
        write_run(tmp_path / name, [line(10 * step) for step in range(1, count + 1)], [begun()])
        for name, count in (("a", steps), ("b", steps + 3))
    ]
    places = [row.tokens for row in compare_runs(runs).curve]
    assert len(places) == len(set(places)) == min(8, steps) and places == sorted(places)
    assert places[-1] == 10_000 * steps
    assert places[0] == 10_000 * max(1, steps // 8), "evenly spread"


def test_losses_between_logged_steps_are_marked_and_those_that_numpy_interpolates(tmp_path: Path) -> None:
    steps = (range(10, 101, 10), range(25, 116, 30))  # nothing in common
    runs = [
        write_run(tmp_path / name, [line(step, loss=9.0 - step**0.5) for step in each], [begun()])
        for name, each in zip("ab", steps, strict=True)
    ]
    found = compare_runs(runs)
    places = [row.tokens for row in found.curve]
    assert places == [25_000, 55_000, 85_000]  # those of the run that has logged less, up to the end of the shorter
    assert all(row.interpolated == [True, False] for row in found.curve)
    for index, run in enumerate(runs):
        x, y = zip(*read_overview(run).loss, strict=True)
        np.testing.assert_allclose([row.losses[index] for row in found.curve], np.interp(places, x, y), rtol=1e-12)
    said = command("compare", *runs).stdout
    assert said.count("~") == 4 and "~ between two logged steps" in said  # three values and the line that explains it


def test_damaged_lines_are_left_out_and_counted(runs: list[Path]) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "attempts.jsonl"):
        with (runs[0] / name).open("ab") as file:
            file.write(b'\0\0 not json\n[1, 2]\n{"step": "x", "tokens": true, "loss": null}\n{"half": ')
    found = read_overview(runs[0])
    assert found.damaged_lines == 6
    assert found.numbers["step"] == 100 and len(found.loss) == 10
    for words in (["show", runs[0]], ["compare", *runs]):
        done = command(*words)
        assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stderr


def test_a_run_that_diverged_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(10), line(20, loss="NaN"), line(30, loss="Infinity")])
    assert math.isinf(read_overview(run).numbers["loss"])
    assert command("show", run).returncode == 0
    assert json.loads(command("show", run, "--json").stdout)["numbers"]["loss"] == "Infinity"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder of a run"):
        read_overview(tmp_path)
    assert command("compare", tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([0, 7], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([math.nan, 1, math.inf, 2], "▁█"),
    ],
)
def test_a_sparkline_has_the_heights_of_the_values(values: list[float], drawn: str) -> None:
    assert sparkline(values, 8) == drawn
    assert len(sparkline([*values] * 100, 8)) <= 8
