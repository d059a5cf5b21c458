"""Both sides of each boundary of the rules for data, budgets and values: what is just right, and what is just wrong."""

from itertools import product

import pytest
import yaml

from hlat.config import RecipeError, load_recipe
from hlat.config.errors import plain_content, size_problem
from hlat.config.layout_rules import _even_splits
from hlat.config.recipe_rules import whole_weights

TOKENS = 10 * 64 * 128  # steps, samples of a step, tokens of a sample

TRAINED = {"path": "tokenizer.json"}


def two(**fields):
    """Two sources, the second with these fields."""
    return [{"path": "a.txt", "name": "a"}, {"path": "b.txt", "name": "b", **fields}]


def weighted(first, second):
    return {"sources": [{"path": "a.txt", "weight": first}, {"path": "b.txt", "weight": second}]}


def phases(*ends):
    """Phases of one source that end after so many tokens."""
    return {
        "sources": [{"path": "a.txt", "name": "a"}],
        "phases": [{"until_tokens": e, "weights": {"a": 1}} for e in ends],
    }


@pytest.fixture
def problems(tmp_path):
    def find(data: dict, **sections: dict) -> set[str]:
        recipe = {
            "model": {"preset": "tiny-1m"},
            "data": {"sequence_length": 128} | data,
            "batch": {"global_batch": 64, "micro_batch": 2},
            "training": {"steps": 10},
            "schedule": {"warmup_steps": 5},
        } | sections
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
        try:
            load_recipe(tmp_path / "r.yaml")
        except RecipeError as error:
            return {problem.path for problem in error.problems}
        return set()

    return find


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ({"path": "a.txt"}, set()),
        ({"sources": two()}, set()),
        ({"sources": two(repeat=2)}, set()),
        ({"sources": two(max_epochs=2)}, {"data.sources.1.max_epochs"}),
        ({"sources": [each | {"weight": 1} for each in two(max_epochs=2)]}, set()),
        ({"sources": [each | {"weight": 1} for each in two(repeat=2)]}, {"data.sources.1.repeat"}),
        ({"sources": two(weight=1)}, {"data.sources.0.weight"}),
        ({"sources": two(weight=1), "phases": phases(None)["phases"]}, {"data.sources.1.weight"}),
        ({"sources": two(repeat=2), "phases": phases(None)["phases"]}, {"data.sources.1.repeat"}),
        ({"sources": [two()[0], two()[0]]}, {"data.sources.1.name"}),
        (weighted(1, 99_999), set()),
        (weighted(1, 100_000), {"data.sources"}),
        (weighted(2, 199_998), set()),
        (weighted(0, 1), set()),
        (weighted(0, 0), {"data.sources"}),
        (phases(None), set()),
        (phases(TOKENS), set()),
        (phases(TOKENS - 1), {"data.phases.0.until_tokens"}),
        (phases(5000, None), set()),
        (phases(5000, 5001, None), set()),
        (phases(5000, 5000, None), {"data.phases.1.until_tokens"}),
        (phases(None, None), {"data.phases.0.until_tokens"}),
        ({"sources": two(text_column="t", tokens_column="i"), "tokenizer": TRAINED}, {"data.sources.1.tokens_column"}),
        ({"sources": two(tokens_column="i")}, {"data.tokenizer.path"}),
        ({"mode": "online", "sources": two(max_tokens=5)}, {"data.sources.1.max_tokens"}),
        ({"mode": "online", "path": "a.txt", "duplicates": "drop"}, {"data.duplicates"}),
        ({"mode": "online", "path": "a.txt", "duplicates": "keep"}, set()),
    ],
)  # fmt: skip
def test_rules_of_data_hold_up_to_their_boundary(problems, data, wrong):
    assert problems(data) == wrong


def test_a_wrong_value_is_shown_even_if_it_is_null(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {preset: tiny-1m}\ndata: {sources: [{path: a}, {path: b, weight: 1}]}\n")
    with pytest.raises(RecipeError, match=r"data\.sources\.0\.weight = (None|null)"):
        load_recipe(tmp_path / "r.yaml")


def test_a_last_phase_reaches_to_the_end_of_the_step_in_which_a_budget_in_tokens_ends(problems):
    budget = {"tokens": TOKENS - 1, "steps": None}
    assert problems(phases(TOKENS), training=budget) == set()
    assert problems(phases(TOKENS - 1), training=budget) == {"data.phases.0.until_tokens"}


@pytest.mark.parametrize(
    ("schedule", "wrong"),
    [
        ({"warmup_steps": 9}, set()),
        ({"warmup_steps": 10}, {"schedule.warmup_steps"}),
        ({"kind": "wsd", "warmup_steps": 5, "decay_fraction": 0.5}, set()),
        ({"kind": "wsd", "warmup_steps": 5, "decay_fraction": 0.6}, {"schedule.decay_fraction"}),
    ],
)
def test_warm_up_and_decay_fit_into_the_run_exactly(problems, schedule, wrong):
    assert problems({"path": "a.txt"}, schedule=schedule) == wrong


@pytest.mark.parametrize(
    ("parallel", "wrong"),
    [
        ({"pipeline": 1}, set()),
        ({"pipeline": 2, "schedule": "1f1b"}, set()),
        ({"pipeline": 2, "schedule": "zbv"}, {"run.compile"}),
    ],
)
def test_blocks_are_compiled_wherever_the_schedule_can_run_them(problems, parallel, wrong):
    assert problems({"path": "a.txt"}, run={"compile": "blocks"}, parallel=parallel) == wrong


@pytest.mark.parametrize(("weights", "whole"), [([2, 4], (1, 2)), ([0.5, 0.25], (2, 1)), ([3, 3, 0], (1, 1, 0))])
def test_weights_become_the_smallest_whole_numbers(weights, whole):
    assert whole_weights(weights) == whole


def test_layers_are_divided_evenly_over_exactly_so_many_stages():
    for layers, stages in product(range(1, 20), [1, 2, 3, 5, 8]):
        [split] = _even_splits(layers, stages) or [None]
        if layers < stages:
            assert split is None
        else:
            assert len(split) == stages and sum(split) == layers and max(split) - min(split) <= 1


def test_an_integer_of_any_length_has_the_digits_that_it_is_said_to_have():
    for digits in (30, 100, 1000, 4000):
        number = 10**digits - 1
        _, (problem,) = plain_content({"x": number})
        said = int(str(problem).split("about ")[1].split()[0])
        assert abs(said - digits) <= 1, "rounded down; 1233 / 4096 is log10(2) up to 1 in 60,000"


def test_values_are_counted_wherever_they_are_and_each_level_counts():
    many = list(range(1000))
    assert size_problem({"a": many}) is None
    for wide in ({"a": [many] * 1000}, [[many] * 1000], {"a": {"b": {str(i): many for i in range(1000)}}}):
        assert "values in it" in str(size_problem(wide))
    nested: object = 0
    for _ in range(31):
        nested = [nested]
    assert size_problem(nested) is None
    assert size_problem({"a": [nested]}) == "it is nested more than 32 levels deep."
    aliases: object = [0]
    for _ in range(40):
        aliases = [aliases, aliases]
    assert "values in it" in str(size_problem(aliases)), "a list that is named twice counts twice"


def test_a_tilde_is_filled_in_where_nothing_else_does_and_an_unknown_user_refused(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    texts = {"data": {"path": "~/a", "tokenizer": {"eos_token": "~"}}, "evaluation": {"prompts": ["~ 5 km"]}}
    content, problems = plain_content({"run": {"dir": "~/runs"}, **texts})
    assert content == {"run": {"dir": "/home/me/runs"}, **texts}
    assert problems == []
    _, (problem,) = plain_content({"run": {"dir": "~nobody-at-all/runs"}})
    assert problem.path == "run.dir" and "no user of this name" in str(problem)
