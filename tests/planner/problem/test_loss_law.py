"""The law of a ladder as a plan asks it: best sizes against a search over shapes, margins against deeper models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlat.config import ModelConfig, load_recipe
from hlat.forecast import CHINCHILLA, Ladder, ScalingLaw, SizeKind, conditions_of, model_sizes, write_ladder
from hlat.model import flops_per_token
from hlat.planner.problem.loss_law import PUBLISHED, LadderLaw, SizeRange
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.shapes import llama_class_shapes
from hlat.runtime.errors import PlanError
from tests.support.planner.ladders import SEQUENCE, ladder_of_law, law_of_fits
from tests.support.planner.requests import request_for

KINDS: tuple[SizeKind, ...] = ("total", "non_embedding", "flops")


@pytest.fixture(scope="module")
def counted() -> list[tuple[int, dict[SizeKind, float]]]:
    """All parameters of every shape, and its sizes."""
    return [
        (size, model_sizes(ModelConfig.model_validate(section), SEQUENCE)) for size, section in llama_class_shapes()
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flops", [1e19, 1e21, 1e23])
def test_the_best_size_is_the_shape_of_least_loss_for_its_own_flops(kind, flops, counted) -> None:
    # A plain search: each shape on the tokens that the FLOPs pay for, its size as the law counts it.
    losses = [CHINCHILLA.loss(sizes[kind], flops / (6 * sizes["flops"])) for _, sizes in counted]
    place = int(np.argmin(losses))
    best = law_of_fits(kind).best_size(flops, 0.0, SEQUENCE)
    assert best.parameters == counted[place][0] and best.loss == pytest.approx(losses[place], rel=1e-12)
    assert best.tokens == pytest.approx(flops / (6 * counted[place][1]["flops"]), rel=1e-12)


@pytest.mark.parametrize("generated", [0.0, 1e11, 1e13])
def test_sizes_in_flops_are_those_of_the_law_alone(generated: float, counted) -> None:
    """No shape matters where size and FLOPs are one: the law's own optimum, a grid search's in tests/forecast."""
    wanted, _ = CHINCHILLA.optimal_size(1e22, generated)
    best = law_of_fits("flops").best_size(1e22, generated, SEQUENCE)
    sizes = [sizes["flops"] for _, sizes in counted]
    chosen = next(place for place, (size, _) in enumerate(counted) if size == best.parameters)
    # The optimum lies between two shapes; either may be the better one, and its neighbour equally good in 6 digits.
    assert min(sizes[max(0, chosen - 2) : chosen + 3]) <= wanted <= max(sizes[max(0, chosen - 2) : chosen + 3])


@pytest.mark.parametrize("kind", KINDS)
def test_no_shape_of_that_loss_trains_and_generates_for_less(kind: SizeKind, counted) -> None:
    """A search over shapes and tokens, to 0.2 % in tokens; shapes are 2 to 10 % apart, where the optimum is flat."""
    flops, generated = 1e22, 1e12
    best = law_of_fits(kind).best_size(flops, generated, SEQUENCE)
    own = next(sizes["flops"] for size, sizes in counted if size == best.parameters)
    tokens = np.geomspace(1e9, 1e14, 6000)
    least = np.inf
    for _, sizes in counted:
        enough = tokens[CHINCHILLA.loss(sizes[kind], tokens) <= best.loss]
        if len(enough):
            least = min(least, 6 * sizes["flops"] * (enough[0] + generated / 3))
    assert flops + 2 * own * generated == pytest.approx(least, rel=3e-3)


def test_a_head_that_counts_for_nothing_makes_larger_models_better(counted) -> None:
    """The same constants by another count are another law: so the counts must not be mixed up."""
    sizes = {kind: law_of_fits(kind).best_size(1e19, 0.0, SEQUENCE).parameters for kind in KINDS}
    published = PUBLISHED.best_size(1e19, 0.0, SEQUENCE).parameters
    assert len(set(sizes.values())) > 1 and sizes["non_embedding"] > published


def test_the_range_of_sizes_is_that_of_the_fits(counted) -> None:
    """Laws whose exponents differ want sizes that differ; the range has 4 of 5 of them."""
    samples = [replace(CHINCHILLA, alpha=CHINCHILLA.alpha + shift) for shift in np.linspace(-0.01, 0.01, 11)]

    def wanted(law: ScalingLaw) -> int:
        return min(counted, key=lambda one: law.loss(one[1]["flops"], 1e22 / (6 * one[1]["flops"])))[0]

    each = sorted(map(wanted, samples))
    found = law_of_fits("flops", *samples).size_range(1e22, 0.0, SEQUENCE)
    assert (found.low, found.high) == (each[1], each[9]), "tenths of eleven values are values"
    assert found.is_determined and not found.at_edge


def test_a_range_of_more_than_twice_or_beyond_the_shapes_determines_nothing() -> None:
    shapes = (1e8, 1e12)
    assert SizeRange(1e9, 2e9, shapes).is_determined and not SizeRange(1e9, 2.1e9, shapes).is_determined
    assert not any(SizeRange(*ends, shapes).is_determined for ends in [(1e8, 1.1e8), (9e11, 1e12)])
    assert law_of_fits("flops").size_range(1e15, 0.0, SEQUENCE).at_edge


def test_a_margin_is_the_loss_of_a_run_on_more_tokens_or_in_a_deeper_model() -> None:
    """Four more layers, of which the FLOPs are so many tenths more; short sequences, whose attention is little."""
    section = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "heads": 8}
    model, deeper = (ModelConfig.model_validate(section | {"layers": layers}) for layers in (20, 24))
    sizes, larger = model_sizes(model, 8), model_sizes(deeper, 8)
    tenths = (larger["flops"] / sizes["flops"] - 1) / 0.1
    tokens = 10**9
    for kind in KINDS:
        law = law_of_fits(kind)
        found = law.margin(sizes, tokens, 0.1 * tenths)
        here = CHINCHILLA.loss(sizes[kind], tokens)
        assert found.tokens == pytest.approx(CHINCHILLA.loss(sizes[kind], (1 + 0.1 * tenths) * tokens) - here)
        # Norms and attention to 8 tokens: parameters and FLOPs over 6 differ by less than 1 %.
        assert found.size == pytest.approx(CHINCHILLA.loss(larger[kind], tokens) - here, rel=1e-2)


def test_layers_that_are_fewer_than_a_tenth_of_the_flops_cannot_pay_for_a_tenth_less() -> None:
    """A narrow model with a wide head: of 1.0 M FLOPs per token over 6, layers have 0.01 M."""
    sizes: dict[SizeKind, float] = {"total": 2e6, "non_embedding": 1e4, "flops": 1e6}
    less = law_of_fits("non_embedding").margin(sizes, 10**9, -0.1)
    assert less.size is None and less.tokens > 0
    assert less.words("fewer tokens", "a smaller one") == f"{less.tokens:+.2g} in fewer tokens"
    assert law_of_fits("flops").margin(sizes, 10**9, -0.1).size is not None


@pytest.fixture(scope="module")
def ladder() -> LadderLaw:
    return LadderLaw(ladder_of_law(), Path("runs/ladder"))


def test_a_ladder_of_a_known_law_chooses_as_that_law(ladder: LadderLaw, counted) -> None:
    wanted, _ = CHINCHILLA.optimal_size(1e20)
    best = ladder.best_size(1e20, 0.0, SEQUENCE)
    size = next(sizes["flops"] for parameters, sizes in counted if parameters == best.parameters)
    # The fit leans on what is known of such laws beforehand: 2 orders of magnitude away, sizes agree to a quarter.
    assert size == pytest.approx(wanted, rel=0.25)


def test_a_forecast_says_how_far_the_run_is_from_the_ladder(ladder: LadderLaw) -> None:
    request = request_for("llama-3.2-1b", "p5.48xlarge:1", tokens=10**10)
    found = ladder.forecast(request.model, SEQUENCE, request.tokens, request.tokens_per_step, None)
    largest = max(run.tokens * run.sizes["flops"] for run in ladder.ladder.runs)
    assert found.beyond == pytest.approx(flops_per_token(request.model, SEQUENCE) * request.tokens / (6 * largest))
    assert found.range.low <= found.range.loss <= found.range.high and not found.warnings
    words = dict(found.facts(1234.0))
    assert "24 runs of runs/ladder" in words["loss"] and f"{found.beyond:.2g} times the FLOPs" in words["loss"]
    assert "$120" in words["margin"]
    unlike = ladder.forecast(request.model, 4096, request.tokens, request.tokens_per_step, None)
    assert "data.sequence_length is 4096, and 2048 in the ladder" in unlike.warnings[-1]


def test_options_of_a_plan_differ_from_the_ladder_as_a_recipe_would(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ("data.path=none",))
    write_ladder(tmp_path, Ladder(ladder_of_law().runs, conditions_of(recipe)))

    def warned(**options: Any) -> str:
        question = {"sequence": None, "global_batch": None, "precision": None, **options}
        loss = request_for("quickstart", "p5.48xlarge:1", ladder=tmp_path, **question).loss
        # Its few tokens per parameter are told in each case.
        return " ".join(one for one in loss.warnings if "tokens per parameter" not in one) if loss else "none"

    batch = recipe.tokens_per_step
    assert warned() == ""
    assert f"batch.tokens is {2 * batch}, and {batch} in the ladder" in warned(
        global_batch=2 * recipe.batch.global_batch
    )
    assert "schedule.warmup_share is " in warned(tokens=10 * recipe.total_tokens)
    with pytest.raises(PlanError, match=r"measure something else: data\.sequence_length is 128, and"):
        warned(sequence=128)


def test_mistakes_with_a_ladder_are_said_first(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no ladder can be read"):
        _ = PlanQuestion("llama-2-7b", ladder=tmp_path).catalog
    with pytest.raises(PlanError, match="--ladder: the law of a ladder is of runs without stages"):
        request_for("olmo3-7b-stages", sequence=None, global_batch=None, ladder=tmp_path)
