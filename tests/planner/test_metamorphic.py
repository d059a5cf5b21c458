"""Questions whose answers are related: better hardware is never slower, twice the price costs twice as much, and so on.

The answers are those of the search with its simulation, so that they hold for the plan that a user sees. Questions are
random and seeded: 40 in the default suite, 500 with ``-m slow``.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from hlat.config import PRESETS, RecipeError
from hlat.config.load import parse_recipe
from hlat.hardware import Chip, Cluster, load_catalog
from hlat.planner.plan import make_plan, recipe_fragment
from hlat.planner.problem.layouts import layout_text, parse_layout
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import PlanRequest, resolve_request
from hlat.planner.search import LayoutPrediction, fastest_layouts, predict_layout
from hlat.precision import MODES
from hlat.runtime.errors import PlanError

MODELS = [name for name in ("llama-2-7b", "llama-2-70b", "llama-3.1-8b", "llama-3.2-1b") if name in PRESETS]
INSTANCES = ("h100", "p4d.24xlarge", "trn1.32xlarge", "trn2.48xlarge", "b200", "tpu-v5p")
RATES = ("link", "network", "bandwidth", "memory", "peak")
# A fastest layout is chosen from finalists, by their simulation; another number of ties cannot change its time, but the
# floating-point sums of a simulation can, in the last bits.
EXACT = 1 + 1e-9


def better(cluster: Cluster, what: str, factor: float) -> Cluster:
    """The same cluster with a higher rate or more memory."""
    instance, chip = cluster.instance, cluster.chip
    if what in ("link", "network"):
        rate = getattr(instance, what)
        return replace(cluster, instance=instance.model_copy(update={what: factor * rate}))
    return replace(cluster, chip=better_chip(chip, what, factor))


def better_chip(chip: Chip, what: str, factor: float) -> Chip:
    if what == "peak":
        faster = {name: one.model_copy(update={"dense": factor * one.dense}) for name, one in chip.tflops.items()}
        return chip.model_copy(update={"tflops": faster})
    name = {"bandwidth": "gb_per_second", "memory": "gib"}[what]
    memory = chip.memory.model_copy(update={name: factor * getattr(chip.memory, name)})
    return chip.model_copy(update={"memory": memory})


def requests(seed: int, count: int) -> Iterator[tuple[random.Random, PlanRequest, list[LayoutPrediction]]]:
    """Yield random requests that fit, with their fastest layouts."""
    generator, catalog = random.Random(seed), load_catalog()
    while count:
        instance = catalog.instance(generator.choice(INSTANCES))
        cluster = Cluster(instance, catalog.chip(instance.chip), generator.choice((1, 2, 4, 8)))
        sizes = {"sequence": generator.choice((2048, 4096)), "global_batch": generator.choice((64, 128, 256))}
        try:
            request = resolve_request(PlanQuestion(generator.choice(MODELS), tokens=10**10, **sizes), cluster)
        except PlanError:
            continue
        if found := fastest_layouts(request):
            count -= 1
            yield generator, request, found


def violations(seed: int, count: int) -> list[str]:
    """Ask five questions about each of some requests; return those whose answers contradict each other."""
    wrong = []
    for generator, request, found in requests(seed, count):
        for what in RATES:
            factor = generator.choice((1.1, 2.0, 4.0))
            other = fastest_layouts(replace(request, cluster=better(request.cluster, what, factor)))
            if not other or other[0].step_seconds > EXACT * found[0].step_seconds:
                wrong.append(f"{request.name} on {request.cluster.name}, {what} x {factor}: {found[0].candidate}")
    return wrong


def test_better_hardware_is_never_slower() -> None:
    assert violations(seed=1, count=8) == []


@pytest.mark.slow
def test_better_hardware_is_never_slower_in_500_questions() -> None:
    assert violations(seed=7, count=100) == []


def test_a_layout_that_is_named_is_predicted_as_it_was_found() -> None:
    for _, request, found in requests(seed=2, count=3):
        assert found == sorted(found, key=lambda one: one.step_seconds)
        for one in found[:3]:
            again = predict_layout(request, parse_layout(layout_text(one.candidate), request))
            assert (again.candidate, again.step_seconds) == (one.candidate, one.step_seconds)
            assert (again.peak_memory, again.days) == (one.peak_memory, one.days)


def test_price_and_tokens_change_cost_and_days_alone() -> None:
    for _, request, found in requests(seed=3, count=4):
        prices = request.cluster.instance.prices
        if not prices:
            continue
        kind = next(iter(prices))
        double = prices[kind].model_copy(update={"usd_per_hour": 2 * prices[kind].usd_per_hour})
        instance = request.cluster.instance.model_copy(update={"prices": {kind: double}})
        layout = found[0].candidate
        base = predict_layout(replace(request, price=kind), layout)
        dear = predict_layout(replace(request, price=kind, cluster=replace(request.cluster, instance=instance)), layout)
        longer = predict_layout(replace(request, price=kind, tokens=3 * request.tokens), layout)
        assert dear.cost_usd == pytest.approx(2 * base.cost_usd) and dear.days == base.days
        assert longer.days == pytest.approx(3 * base.days) and longer.step_seconds == base.step_seconds


def test_a_fragment_is_accepted_as_a_recipe() -> None:
    """With the model, the sequence and the number of processes of the plan."""
    for _, request, found in requests(seed=4, count=3):
        for one in found[:4]:
            sections = yaml.safe_load(recipe_fragment(request, one.candidate))
            recipe = parse_recipe(
                {
                    **sections,
                    "model": {"preset": request.name},
                    "data": {"path": "none", "sequence_length": request.sequence},
                    "training": {"tokens": request.tokens},
                    "run": {"name": "planned"},
                },
                world=request.cluster.devices,
            )
            assert recipe.parallel.tensor == one.candidate.tensor


def fragments_refused(seed: int, count: int) -> list[str]:
    """Write the layouts of random questions on every kind of machine as recipes; return those that are refused."""
    generator, catalog = random.Random(seed), load_catalog()
    wrong: list[str] = []
    while count:
        instance = generator.choice(catalog.instances)
        chip = catalog.chip(instance.chip)
        cluster = Cluster(instance, chip, generator.choice((1, 2, 4)))
        question = {
            "sequence": generator.choice((1024, 2048, 4096, 5120)),
            "global_batch": generator.choice((24, 64, 96, 256)),
            "precision": generator.choice((None, *MODES)),
        }
        try:
            request = resolve_request(
                PlanQuestion(generator.choice(sorted(PRESETS)), tokens=10**10, **question), cluster
            )
        except PlanError:
            continue
        found = fastest_layouts(request)
        count -= bool(found)
        for one in generator.sample(found, min(3, len(found))):
            fragment = recipe_fragment(request, one.candidate)
            given = yaml.safe_load(fragment)
            model = {"preset": request.name, **given.get("model", {})}
            sections = {**given, "model": model, "run": {"name": "planned"}}
            sections["data"] = {"path": "none", "sequence_length": request.sequence}
            sections["training"] = {"tokens": request.tokens}
            try:
                parse_recipe(sections, world=request.cluster.devices)
            except RecipeError as error:
                wrong.append(f"{request.name} {request.mode} on {request.cluster.name}: {one.candidate}: {error}")
    return wrong


def test_fragments_of_random_questions_are_accepted() -> None:
    """By the checks of `hlat check --world`, on chips with a backend and without."""
    assert fragments_refused(seed=21, count=12) == []


@pytest.mark.slow
def test_fragments_of_200_random_questions_are_accepted() -> None:
    assert fragments_refused(seed=22, count=200) == []


def test_a_plan_of_a_search_lists_its_alternatives_from_the_fastest() -> None:
    _, request, _ = next(requests(seed=5, count=1))
    times = [one.step_seconds for one in make_plan(request).alternatives]
    assert times == sorted(times)
