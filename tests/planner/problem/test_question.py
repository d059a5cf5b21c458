"""The question of a plan: one description behind command line and Python API."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

import hlat
from hlat.cli.plan import plan_command
from hlat.planner.problem.question import PlanQuestion, check_options
from hlat.runtime.errors import PlanError

OPTIONS: dict[str, Any] = dict.fromkeys(inspect.signature(plan_command).parameters)
FIELDS = {field.name for field in fields(PlanQuestion)}


@pytest.mark.parametrize("name", ["compare_plans", "choose_cluster", "choose_model_size"])
def test_arguments_of_the_api_are_fields_with_the_same_defaults(name: str) -> None:
    for argument in inspect.signature(getattr(hlat, name)).parameters.values():
        assert argument.name in FIELDS
        if argument.default is not argument.empty:
            assert argument.default == getattr(PlanQuestion(), argument.name)


def test_every_field_has_an_option() -> None:
    assert FIELDS - OPTIONS.keys() == {"clusters", "sequence"}, "--cluster and --sequence-length"


def test_options_and_arguments_ask_the_same_question() -> None:
    given = {"model": "llama-2-7b", "cluster": ["h100:8"], "tokens": "300B", "sequence_length": 4096, "chips": "any"}
    question = PlanQuestion("llama-2-7b", ["h100:8"], tokens=300 * 10**9, sequence=4096)
    assert PlanQuestion.of_options(OPTIONS | {"search": False} | given) == question


def test_all_mistakes_are_named_at_once() -> None:
    given = {"model": "llama-2-7b", "deadline": "9d", "flops": "1e22"}
    with pytest.raises(PlanError) as caught:
        check_options(OPTIONS | given)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["--cluster", "--deadline", "--flops"] and len(lines) == 3
