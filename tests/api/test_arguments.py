"""Calls of the Python API with wrong arguments: one typed error that says what is wrong and what would work."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import hlat
from hlat.api.recipes import checks_arguments, describe_wrong_call

RECIPE = "quickstart"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hlat.train(steps=3), ["no argument steps", "recipe is missing"]),
        (lambda: hlat.train(steps=3), ['hlat.train(RECIPE, {"training.steps": 3}).', "It takes recipe, overrides, "]),
        (lambda: hlat.train(RECIPE, learning_rate=1e-3, steps=3), ['{"optimizer.lr": 0.001, "training.steps": 3}']),
        (lambda: hlat.train(RECIPE, {}, 2), ["3 arguments are given without a name", "as in nproc=..."]),
        (lambda: hlat.train(RECIPE, gpus=2), ["no argument gpus", "For gpus there is nproc."]),
        (lambda: hlat.train(RECIPE, dp=2), ["For dp there is nproc: what is left of the processes shares the batch."]),
        (lambda: hlat.plan("llama-2-7b", "h100:1", batch_size=2), ["Here batch_size is global_batch."]),
        (lambda: hlat.train(RECIPE, nprocs=2), ["Did you mean nproc?"]),
        (lambda: hlat.train(RECIPE, batch_size=2), ["In recipes, batch_size is batch.global_batch (sequ"]),
        (lambda: hlat.train(RECIPE, recipe=RECIPE), ["recipe is given twice"]),
        (lambda: hlat.load_recipe(RECIPE, lr=1), ['hlat.load_recipe(PATH, {"optimizer.lr": 1}).']),
        (lambda: hlat.submit_slurm(RECIPE, steps=1), ["nodes is missing", '{"training.steps": 1}, nodes=...).']),
        (lambda: hlat.generate("run"), ["hlat.generate: prompt is missing."]),
        (hlat.runs, ["hlat.runs: folder is missing. It takes folder."]),
    ],
)  # fmt: skip
def test_a_wrong_call(call: Any, says: list[str]) -> None:
    with pytest.raises(hlat.LaunchError) as caught:
        call()
    for text in says:
        assert text in str(caught.value)


def test_every_function_of_the_api_checks_its_arguments() -> None:
    functions = [function for name in hlat._API["api"] if inspect.isfunction(function := getattr(hlat, name))]
    assert len(functions) > 20
    for function in functions:
        with pytest.raises(hlat.LaunchError, match=f"hlat.{function.__name__}: there is no argument colour"):
            function(colour="red")


def test_an_example_of_a_message_is_a_call_that_works(recipe_file: Path, tiny: list[str]) -> None:
    """The call in the message for ``hlat.load_recipe(steps=50)``, with a recipe in place of PATH, loads that recipe."""
    sections = hlat.load_recipe(recipe_file, tiny).model_dump(mode="json")
    with pytest.raises(hlat.LaunchError) as caught:
        hlat.load_recipe(steps=50)  # type: ignore[call-arg]
    example = str(caught.value).partition("of the recipe: ")[2].partition(". It takes")[0]
    recipe = eval(example, {"hlat": hlat, "PATH": sections})
    assert recipe.training.steps == 50


def test_errors_within_a_function_are_its_own() -> None:
    @checks_arguments
    def broken(value: int) -> int:
        return value + ""  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        broken(1)
    assert "value is missing." in describe_wrong_call("broken", inspect.signature(broken), (), {})
