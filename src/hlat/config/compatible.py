"""Defaults beside values that a recipe gives: a default gives way, so that it never refuses a recipe.

    Values, fields that are given --compatible_defaults--> {field: value} for defaults that a rule would refuse

What is best for a model and its devices is chosen later (``hlat.planner.defaults``); here a value only has to be
possible. Where none is, the default stays, and its rule says what is wrong.
"""

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

from hlat.config.layout_checks import (
    CHECKS,
    Unavailable,
    Values,
    batches,
    data_degree,
    divisors,
    full_pipeline,
    holds,
    sequence_shards,
)

Given = Callable[[str], bool]  # True for a field, by its dotted path, that the recipe gives


def compatible_defaults(values: Values, is_given: Given) -> dict[str, Any]:
    """Return other values for the defaults that cannot stand beside what the recipe gives."""
    found: dict[str, Any] = {}
    for path, choose in _CHOICES.items():
        if path not in values or is_given(path):
            continue
        try:
            value = next(choose(values, is_given), values(path))
        except Unavailable:  # what it depends on has an error of its own
            continue
        if value != values(path):
            found[path] = value
            values = values.having(path, value)  # later ones see it
    return found


def _sequence_length(v: Values, is_given: Given) -> Iterator[int]:
    longest = v("model.max_sequence_length")
    if longest is not None and longest < v("data.sequence_length"):
        yield longest


def _global_batch(v: Values, is_given: Given) -> Iterator[int]:
    # Whole micro-batches, if their size is given, for every data-parallel rank and every rank of a pipeline.
    micro = v("batch.micro_batch") if is_given("batch.micro_batch") else 1
    unit = micro * (data_degree(v) if "world" in v else 1)
    least = unit * v("parallel.pipeline")
    yield max(least, -(-v("batch.global_batch") // unit) * unit)


def _micro_batch(v: Values, is_given: Given) -> Iterator[int]:
    whole = gcd(v("batch.global_batch"), *(stage.global_batch for stage in v("batch.ramp")))
    for size in reversed([size for size in divisors(whole) if size <= v("batch.micro_batch")]):
        if all(holds(check, v.having("batch.micro_batch", size)) for check in CHECKS):
            yield size
    yield 1  # and the rule says what else is in the way


def _sequence(v: Values, is_given: Given) -> Iterator[bool]:
    if not holds(sequence_shards, v):
        yield False


def _schedule(v: Values, is_given: Given) -> Iterator[str]:
    if not holds(full_pipeline, v) and v("parallel.virtual_stages") is None:
        yield "gpipe"


def _policy(v: Values, is_given: Given) -> Iterator[str]:
    if v("memory.budget_gib") is not None:
        yield "budget"


def _decay_fraction(v: Values, is_given: Given) -> Iterator[float]:
    sequences = -(-(v("training.tokens") or 0) // v("data.sequence_length"))
    end = v("schedule.horizon_steps") or v("training.steps") or batches(v).count(sequences)
    if v("schedule.kind") == "wsd" and v("schedule.warmup_steps") < end:
        rest = (end - v("schedule.warmup_steps")) / end
        if rest < v("schedule.decay_fraction"):
            yield rest


_CHOICES: dict[str, Callable[[Values, Given], Iterator[Any]]] = {
    "data.sequence_length": _sequence_length,
    "batch.global_batch": _global_batch,
    "batch.micro_batch": _micro_batch,
    "parallel.sequence": _sequence,
    "parallel.schedule": _schedule,
    "memory.activation_checkpointing": _policy,
    "schedule.decay_fraction": _decay_fraction,
}
"""In the order in which they are chosen: each yields the values to use instead, the most wanted first."""
