"""Arguments of the functions of the Python API: a call with wrong ones is a ``LaunchError`` that says what would work.

    call --bind to the signature--> the function, or every wrong argument at once

For a field of the recipe in place of an argument (``hlat.train(steps=3)``) the message has the call that sets it.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from hlat.config import field_called, short
from hlat.runtime.errors import LaunchError

P = ParamSpec("P")
R = TypeVar("R")

_OF_THE_RECIPE = "overrides"  # argument of the functions that change a recipe while they load it


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of the API refuse arguments that it does not take, or lacks, with a ``LaunchError``."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            message = describe_wrong_call(function.__name__, signature, args, kwargs)
        else:
            return function(*args, **kwargs)
        raise LaunchError(message)

    return checked


def describe_wrong_call(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    """Say what is wrong with the arguments of a call, and what the function takes.

    Args:
        name: name of the function.
        signature: its parameters.
        args: arguments given by position.
        kwargs: arguments given by name.
    """
    problems = list(_problems(signature, args, kwargs))
    fields = _meant_fields(signature, kwargs)
    if fields:
        settings = ", ".join(f'"{field}": {short(value)}' for field, value in fields.items())
        verb = "is a field" if len(fields) == 1 else "are fields"
        example = _example(name, signature, f"{{{settings}}}")
        problems.append(f"{' and '.join(fields)} {verb} of the recipe: {example}.")
    return f"hlat.{name}: {' '.join(problems)} It takes {', '.join(signature.parameters)}."


def _problems(signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each thing wrong with a call."""
    parameters = signature.parameters
    by_position = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    unknown = [each for each in kwargs if each not in parameters]
    if unknown:
        yield " ".join([f"there is no argument {' or '.join(unknown)}.", *_meant(unknown, parameters)])
    if len(args) > len(by_position):
        by_name = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
        example = f" Name the others, as in {by_name[0]}=..." if by_name else ""
        yield f"{len(args)} arguments are given without a name, and only {' and '.join(by_position)} may be.{example}"
    if twice := [each for each in by_position[: len(args)] if each in kwargs]:
        yield f"{' and '.join(twice)} is given twice, by position and by name."
    given = {*by_position[: len(args)], *kwargs}
    required = [each.name for each in parameters.values() if each.default is each.empty]
    if missing := [each for each in required if each not in given]:
        yield f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."


def _meant(unknown: list[str], parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield a sentence for each unknown argument that resembles another, or is called so by another program."""
    for name in unknown:
        meant = field_called(name) or ""
        option, note = meant.removeprefix("--").partition(" ")[0], meant.partition(": ")[2]
        close = get_close_matches(name, parameters, n=1, cutoff=0.7)
        if meant.startswith("--") and option in parameters:
            yield f"For {name} there is {option}{': ' if note else ''}{note}."
        elif own := _named_like_a_field(meant, parameters):
            yield f"Here {name} is {own}."
        elif close:
            yield f"Did you mean {close[0]}?"
        elif meant and not meant.startswith("--") and not _is_field(meant):
            yield f"In recipes, {name} is {meant}."


def _named_like_a_field(meant: str, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the argument that has the name of a field; None for a function that takes the fields themselves."""
    if _OF_THE_RECIPE in parameters:
        return None
    return next((name for name in re.findall(r"\w\.(\w+)", meant) if name in parameters), None)


def _is_field(meant: str) -> bool:
    """Return True for the path of a field; an option, or a field that means something else, has a note behind it."""
    return meant.replace(".", "_").isidentifier()


def _meant_fields(signature: inspect.Signature, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a recipe that unknown arguments stand for, with the values given."""
    if _OF_THE_RECIPE not in signature.parameters:
        return {}
    meant = {name: field_called(name) for name in kwargs if name not in signature.parameters}
    return {field: kwargs[name] for name, field in meant.items() if field and _is_field(field)}


def _example(name: str, signature: inspect.Signature, overrides: str) -> str:
    """Write a call with the arguments that are required and overrides, as in ``hlat.train(RECIPE, {...})``."""
    required = [each for each in signature.parameters.values() if each.default is each.empty]
    places = [each.name.upper() for each in required if each.kind is each.POSITIONAL_OR_KEYWORD] or ["RECIPE"]
    names = [f"{each.name}=..." for each in required if each.kind is each.KEYWORD_ONLY]
    return f"hlat.{name}({', '.join([*places, overrides, *names])})"
