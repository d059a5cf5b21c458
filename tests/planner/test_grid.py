"""Grids of plans: against plans of each cell, against every layout that a reason speaks of, and against their page."""

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hlat
from hlat.planner.expected import median_days
from hlat.planner.grid import GridCell, _doublings, check_grid_options, grid_lines, grid_page, plan_grid
from hlat.planner.memory import rank_memory, ranks_of_interest
from hlat.planner.problem.layouts import candidates, layout_text
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.search import USABLE_MEMORY_SHARE, predict_layout
from hlat.runtime.errors import PlanError
from tests.support.commands import hlat as command
from website.planned_numbers import PRINTED, TABLE, prediction_rows, shown

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
OF_THE_PAGE = [(words.replace("\\\n", " "), output) for words, output in PRINTED.findall(PAGE)]
# One chip always, the others where there is time.
GRIDS = [pytest.param(*case, marks=[] if "trn1" in case[0] else pytest.mark.slow) for case in OF_THE_PAGE]


@pytest.mark.parametrize(("words", "output"), GRIDS, ids=[words.split()[-1] for words, _ in OF_THE_PAGE])
def test_the_page_has_todays_grids(words: str, output: str) -> None:
    result = command(*shlex.split(words)[1:], env={**os.environ, "COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert shown(result.stdout.rstrip(), output) == output


def test_the_page_has_todays_predictions_of_hlats_layouts() -> None:
    tables = TABLE.findall(PAGE)
    assert len(tables) == 2
    for words, rows in tables:
        plan = json.loads(command(*shlex.split(words)[1:], "--json").stdout)
        assert plan["chosen"]["fits"] and prediction_rows(plan) == rows.splitlines()


@pytest.fixture(scope="module")
def cells() -> dict[str, GridCell]:
    """1B on 16 GPUs with fewer sequences than GPUs, 34B on 4, which it does not fit on, pipelines of 8B and of 13B."""
    question = PlanQuestion(chips=None, tokens=10**9, global_batch=8)
    asked = {"1b": "p5.48xlarge:2", "34b": "4xh100:1", "8b": "trn1.32xlarge:1", "13b": "trn1.32xlarge:1"}
    grids = [plan_grid(model, replace(question, clusters=[cluster])) for model, cluster in asked.items()]
    return {cell.model: cell for grid in grids for cell in grid.cells}


def test_the_layout_of_a_cell_is_that_of_a_plan_with_hlats_run_where_nothing_else_is_asked(cells) -> None:
    cell = cells["1b"]
    run = {"tokens": 10**9, "global_batch": 8, "sequence": 4096}
    best = hlat.plan("llama-class-1b", "p5.48xlarge:2", **run).chosen
    assert cell.best is not None and cell.request.sequence == 4096
    assert cell.best.step_seconds == pytest.approx(best.step_seconds, rel=0.04)  # a tie may be broken otherwise


def test_memory_is_named_where_no_layout_fits_and_the_batch_where_none_is_possible(cells) -> None:
    """By an exact count of every layout, not by the estimates that the search begins with."""
    none, piped = cells["34b"], cells["13b"]
    assert none.best is None and none.obstacle == "memory"
    assert piped.best.candidate.pipeline > 1
    assert piped.instead["pp=1"].obstacle == piped.instead["recompute=none"].obstacle == "memory"
    for cell, has in (
        (none, lambda one: one.recompute == "full"),
        (piped, lambda one: one.recompute == "full" and one.pipeline == 1),
        (piped, lambda one: one.recompute == "none"),
    ):
        limit = USABLE_MEMORY_SHARE * cell.request.cluster.memory_bytes
        # A larger micro-batch needs more.
        least = [one for one in candidates(cell.request) if one.micro_batch == 1 and has(one)]
        peaks = [
            max(rank_memory(cell.request, one, rank).total for rank in ranks_of_interest(cell.request, one))
            for one in least
        ]
        assert peaks and min(peaks) > limit
    # 16 data-parallel ranks and 8 sequences.
    alone = cells["1b"].instead["dp only"]
    assert alone.obstacle == "batch" and alone.layout is None and str(alone) == "batch"


def test_an_alternative_has_the_setting_fits_and_takes_so_much_longer(cells) -> None:
    found = [(cell, name, one) for cell in cells.values() for name, one in cell.instead.items() if one.layout]
    assert {name for _, name, _ in found} >= {"tp>8", "pp=1"}
    for cell, name, one in found:
        said = predict_layout(cell.request, one.layout)
        assert said.peak_memory <= USABLE_MEMORY_SHARE * cell.request.cluster.memory_bytes
        assert one.slower == pytest.approx(said.step_seconds / cell.best.step_seconds - 1)
        wanted = {"tp>8": one.layout.tensor > 8, "pp=1": one.layout.pipeline == 1, "tp=1": one.layout.tensor == 1}
        wanted |= {"zero<3": one.layout.zero < 3, "recompute=none": one.layout.recompute == "none"}
        assert wanted.get(name, True)


def test_without_numbers_they_are_doubled_from_the_first_that_fits_to_four_times_the_last() -> None:
    least = {"small": 2, "large": 8}

    def cells_of(number: int) -> list[GridCell]:
        best: Any = object()  # a prediction; only whether there is one decides
        request: Any = number
        return [GridCell(name, request, best if number >= first else None, None, {}) for name, first in least.items()]

    def numbers() -> list[Any]:
        return [column[0].request for column in _doublings(cells_of(1), cells_of)]

    assert numbers() == [2, 4, 8, 16, 32]
    least["large"] = 10**9
    assert numbers() == [2, 4, 8, 16, 32, 64, 128], "of a model that never fits"
    least.clear()
    least["never"] = 10**9
    assert numbers() == []


def test_lines_fit_100_columns_and_the_page_needs_no_other_file() -> None:
    assert OF_THE_PAGE and max(len(line) for _, output in OF_THE_PAGE for line in output.splitlines()) <= 100
    found = hlat.plan_grid("tiny-1m", clusters=["p5.48xlarge:1,2"], tokens=10**6, global_batch=8)
    page = grid_page(found)
    own = re.sub(r"(?s)<script>.*?</script>", "", page)
    assert re.findall(r"<h1>(.*?)</h1>", own) == ["tiny-1m on p5.48xlarge"]
    assert not re.search(r"(?:src|href)=\"(?!data:)", own)
    (chart,) = re.findall(r'(?s)<script type="application/json">(.*?)</script>', page)
    cells, missing = json.loads(chart)["data"]
    assert cells["z"] == [[cell.best.mfu for cell in found.cells]] and missing["z"] == [[None, None]]
    assert cells["x"] == ["8", "16"] and cells["y"] == ["tiny-1m"]
    for text, said, cell in zip(cells["text"][0], cells["hovertext"][0], found.cells, strict=True):
        assert f"{median_days(cell.best)} days" in text and said == layout_text(cell.best.candidate)
    assert json.loads(json.dumps(found.to_dict()))["cells"][1]["cluster"] == "p5.48xlarge:2"
    assert any("tiny-1m" in line for line in grid_lines(found, 80))


def test_mistakes_are_named_together() -> None:
    with pytest.raises(PlanError, match=r"(?s)--model, --deadline.*--cluster p5.48xlarge:1,8"):
        check_grid_options({"grid": "1b", "model": "x", "deadline": "9d", "cluster": None, "chips": None})
    with pytest.raises(PlanError, match=r"(?s)'x'.*'y'"):
        hlat.plan_grid("x,1b,y", clusters=["p5.48xlarge:1"])
    with pytest.raises(PlanError, match="one kind"):
        hlat.plan_grid("1b", clusters=["p5.48xlarge:1", "trn2.48xlarge:1"])
    with pytest.raises(PlanError, match="0 models"):
        hlat.plan_grid(" ,", clusters=["p5.48xlarge:1"])
    with pytest.raises(PlanError, match=r"each stage has its own. `hlat plan olmo3-7b-stages`"):
        hlat.plan_grid("olmo3-7b-stages", clusters=["p5.48xlarge:1"])
