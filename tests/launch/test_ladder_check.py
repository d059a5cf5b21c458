"""``hlat check`` reads the ladder that a recipe names, and says what stops the run that it would forecast."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hlat.config import Recipe, RecipeError
from hlat.config.load import parse_recipe
from hlat.forecast import (
    Ladder,
    LadderRun,
    ScalingLaw,
    conditions_of,
    read_ladder,
    sizes_of,
    write_forecast,
    write_ladder,
)
from hlat.launch.start_examination import StartReport, load_and_check
from hlat.launch.start_place import Here


def content(corpus: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "device": "cpu", "ladder": str(folder)},
        "model": {"preset": "tiny-1m"},
        "data": {"path": str(corpus), "sequence_length": 64, "validation": {"by": "tail"}},
        "batch": {"global_batch": 8, "micro_batch": 8},
        "training": {"steps": 10},
        "optimizer": {"lr": 1e-3},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def check(sections: dict[str, Any]) -> StartReport:
    return load_and_check(lambda: parse_recipe(sections, world=1), Here(1, 1))


def write(folder: Path, recipe: Recipe, runs: int = 9) -> None:
    """A ladder of runs of a law, exactly."""
    law, sizes, found = ScalingLaw(1.5, 30.0, 60.0, 0.3, 0.35), sizes_of(recipe), []
    for number, (share, length) in enumerate([(n, d) for n in (0.1, 0.2, 0.4) for d in (0.1, 0.3, 0.8)]):
        size, tokens = {kind: share * each for kind, each in sizes.items()}, int(length * recipe.total_tokens)
        end = law.loss(size["flops"], tokens)
        found.append(LadderRun(str(number), size, tokens, end, ((0.5, 1.2 * end), (1.0, end))))
    write_ladder(folder, Ladder(tuple(found[:runs]), conditions_of(recipe)))


def test_a_ladder_that_forecasts_the_run_passes(corpus: Path, tmp_path: Path) -> None:
    sections = content(corpus, tmp_path)
    write(tmp_path, parse_recipe(sections))
    report, end = check(sections), read_ladder(tmp_path).forecast_recipe(parse_recipe(sections)).end
    (note,) = report.notes
    assert note.kind == "note" and f"validation loss {end.loss:.3f} at the end" in note.text
    assert report.before_training == ()  # the run says it, when it registers its forecast


@pytest.mark.parametrize(("runs", "reason"), [(0, "no ladder can be read there"), (3, "determines no law.*train 2")])
def test_a_ladder_that_forecasts_nothing_is_refused(corpus: Path, tmp_path: Path, runs: int, reason: str) -> None:
    sections = content(corpus, tmp_path)
    if runs:
        write(tmp_path, parse_recipe(sections), runs)
    with pytest.raises(RecipeError) as refused:
        check(sections)
    (problem,) = refused.value.problems
    assert problem.path == "run.ladder" and re.search(reason, problem.reason)


def test_a_ladder_of_another_text_is_refused_and_of_another_rate_told(corpus: Path, tmp_path: Path) -> None:
    sections = content(corpus, tmp_path)
    write(tmp_path, parse_recipe({**sections, "optimizer": {"lr": 1e-4}}))
    _, note = check({**sections, "optimizer": {"lr": 2e-4}}).notes
    assert note.kind == "warning" and "optimizer.lr is 0.0002, and 0.0001 in the ladder" in note.text
    write(tmp_path, parse_recipe(content(corpus, tmp_path, data={"sequence_length": 32})))
    with pytest.raises(RecipeError, match=r"data\.sequence_length is 64, and 32 in the ladder") as refused:
        check(sections)
    assert [problem.path for problem in refused.value.problems] == ["run.ladder"]


def test_text_that_is_read_often_is_told_since_the_law_is_of_new_text(corpus: Path, tmp_path: Path) -> None:
    sections = content(corpus, tmp_path)
    write(tmp_path, parse_recipe(sections))
    assert not any("text is read" in note.text for note in check(sections).notes)
    # Each step has 512 tokens, and a text has at most as many tokens as bytes.
    steps = 5 * sum(file.stat().st_size for file in corpus.iterdir()) // 512
    longer = {**sections, "training": {"steps": steps}}
    write(tmp_path, parse_recipe(longer))
    assert any("text is read" in note.text and "times" in note.text for note in check(longer).notes)


def test_a_run_that_has_its_forecast_needs_no_ladder(corpus: Path, tmp_path: Path) -> None:
    sections = content(corpus, tmp_path)
    write(tmp_path, parse_recipe(sections))
    forecast = read_ladder(tmp_path).forecast_recipe(parse_recipe(sections))
    (tmp_path / "run").mkdir()
    write_forecast(tmp_path / "run", forecast, datetime.now(UTC))
    (tmp_path / "ladder.json").unlink()
    (note,) = check(sections).notes
    assert f"by ladder {forecast.ladder}" in note.text
    edited = (tmp_path / "run" / "forecast.json").read_text().replace(f'"tokens": {forecast.tokens}', '"tokens": 7')
    (tmp_path / "run" / "forecast.json").write_text(edited)
    with pytest.raises(RecipeError, match="edited after it was written"):
        check(sections)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"data": {"validation": {"fraction": 0}}}, "no validation text"),
        ({"training": {}, "stages": [{"name": "a", "steps": 5}, {"name": "b", "steps": 5}]}, "stages change them"),
    ],
)
def test_a_recipe_whose_loss_no_ladder_forecasts_is_refused(
    corpus: Path, tmp_path: Path, sections: dict[str, Any], reason: str
) -> None:
    wanted = {**content(corpus, tmp_path), **sections}
    wanted["data"] = {**content(corpus, tmp_path)["data"], **sections.get("data", {})}
    with pytest.raises(RecipeError) as refused:
        parse_recipe(wanted)
    (problem,) = refused.value.problems
    assert problem.path == "run.ladder" and reason in problem.reason
