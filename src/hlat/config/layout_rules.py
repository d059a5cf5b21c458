"""Validation of ``parallel``: the field to report for a failed check, and the nearest values that would pass.

    check -> wrong? -> the field, candidates for it and for the fields it depends on
        -> each tried with every check --refusal--> Problem with the nearest fixes, and a sentence that names them

A fix is never derived from one rule alone: each candidate is put into the recipe and all checks run, so that a named
value really works. If other checks fail too, the candidates that leave the fewest failing win. A rule that depends on a
failed check is skipped, because its report would only repeat that problem.

A default gives way to what a recipe gives, so that it never refuses one:

    Values, fields that are given --compatible_defaults--> {field: value} for defaults that a rule would refuse

What is best for a model and its devices is chosen later (``hlat.planner.defaults``); here a value only has to be
possible. Where none is, the default stays, and its rule says what is wrong.

``ROUNDING_RULES`` are those of stochastic rounding in hardware: where it is right, and in which layouts copies of a
weight would drift apart.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hlat.config.errors import Fix, Problem
from hlat.config.layout_checks import (
    CHECKS,
    STAGE_CHECKS,
    Check,
    Rule,
    Unavailable,
    Values,
    context_chunks,
    data_degree,
    data_parallel_batch,
    divisors,
    full_pipeline,
    holds,
    micro_batch_counts,
    micro_batches,
    model_ranks,
    pipeline_layers,
    replicas_of_data,
    replicas_of_something,
    sequence_shards,
    split,
    stage_reasons,
    stages_per_rank,
    steps_of,
    tensor_degree,
    virtual_stages,
    whole_rounds,
    world_of_models,
    zero_stage,
)
from hlat.config.sections.training import Schedule, default_virtual_stages

_NAMED_FIXES = 2  # values per field that a remedy names
_MOST_TRIED = 256  # candidates per field that are tried, nearest first


def refusal(
    v: Values, path: str, check: Check, candidates: Mapping[str, Iterable[Any]], given: tuple[Check, ...] = ()
) -> list[Problem]:
    """Report a field that fails a check, with all reasons and what would work; an empty list if it passes.

    ``candidates`` are values that may work, by field; numbers in any order, others in the order of preference.

    Raises:
        Unavailable: a check of ``given`` fails, on which this one depends: the report would only repeat it.
    """
    if not all(holds(other, v) for other in given):
        raise Unavailable(path)
    reasons = list(check(v))
    if not reasons:
        return []
    fixes = _nearest_fixes(v, candidates, check, given)
    return [Problem(path, _sentence(reasons), _remedy(path, fixes), v(path), True, fixes)]


def _nearest_fixes(
    v: Values, candidates: Mapping[str, Iterable[Any]], check: Check, given: tuple[Check, ...]
) -> tuple[Fix, ...]:
    found: list[tuple[int, Fix]] = []
    for path, values in candidates.items():
        for value in _by_distance(v(path), values):
            # Each candidate is tried in the whole recipe, so that a named value really works.
            changed = v.having(path, value)
            if value != v(path) and holds(check, changed, False) and all(holds(one, changed) for one in given):
                found.append((sum(not holds(other, changed) for other in CHECKS), Fix(path, value)))
    least = min((failing for failing, _ in found), default=0)
    fixes: list[Fix] = []
    for path in candidates:
        best = [fix for failing, fix in found if fix.path == path and failing == least][:_NAMED_FIXES]
        # Numbers ascending, as people list them; other values stay in the order of preference.
        fixes += sorted(best, key=lambda fix: fix.value) if _are_numbers(fix.value for fix in best) else best
    return tuple(fixes)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _by_distance(now: Any, values: Iterable[Any]) -> list[Any]:
    ordered = list(dict.fromkeys(values))
    if _are_numbers([*ordered, now]):
        ordered.sort(key=lambda value: (abs(value - now), value))
    return ordered[:_MOST_TRIED]


def _sentence(reasons: list[str]) -> str:
    # Of several reasons, each but the last loses its full stop.
    return "; ".join([*(reason.removesuffix(".") for reason in reasons[:-1]), reasons[-1]])


def _remedy(path: str, fixes: tuple[Fix, ...]) -> str:
    """Write the fixes as in ``Try 2 or 4, or parallel.sequence=false.``, the problem's own field first."""
    by_path: dict[str, list[str]] = {}
    for fix in sorted(fixes, key=lambda fix: fix.path != path):
        by_path.setdefault(fix.path, []).append(_written(fix.value))
    options = [_option(field, " or ".join(values), field == path) for field, values in by_path.items()]
    return f"Try {', or '.join(options)}." if options else ""


def _option(field: str, values: str, own: bool) -> str:
    if field == "world":
        return f"{values} process{'' if values == '1' else 'es'}"  # the option is named by the verb, which has one
    if own:
        return values
    return f"{field}={values}"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_STAGES = (virtual_stages, pipeline_layers)
_DEGREES = (tensor_degree, context_chunks, sequence_shards, *_STAGES)
_WINDOW = 32  # candidates on either side if any number is possible

# In order of preference: 1f1b demands least of model and batch, gpipe needs the most memory.
_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved-1f1b", "gpipe", "interleaved-zero-bubble", "zbv")

Candidates = dict[str, Iterable[Any]]


def _multiples(unit: int, near: int) -> list[int]:
    below = near // unit
    return [unit * count for count in range(max(1, below - _WINDOW), below + _WINDOW + 2)]


def _divided(whole: int, by: int) -> list[int]:
    return [] if whole < by or whole % by else divisors(whole // by)


def _worlds(v: Values) -> list[int]:
    # Numbers of processes that hold complete models: the nearest ones, and those that divide the batch.
    ranks = model_ranks(v)
    shares = _divided(v("batch.global_batch"), v("batch.micro_batch"))
    return [*_multiples(ranks, v("world")), *(ranks * share for share in shares)]


def _degrees(v: Values, *others: str) -> list[int]:
    # Together with the other degrees they have to divide the world size.
    return _divided(v("world"), math.prod(v(f"parallel.{name}") for name in others)) if "world" in v else []


def _pipelines(v: Values, most: int) -> list[int]:
    return [1, *range(max(1, most - _WINDOW), most + 1), *_degrees(v, "tensor", "context")]


def _micro_batch_sizes(v: Values) -> list[int]:
    # Divisors of a data-parallel rank's share of the batch.
    return _divided(v("batch.global_batch"), data_degree(v) if "world" in v else 1)


def _rule(path: str, check: Check, candidates: Callable[[Values], Candidates], given: tuple[Check, ...] = ()) -> Rule:
    """Make the rule that a field passes a check, from the candidates that may pass it; see ``refusal``."""
    return lambda v: refusal(v, path, check, candidates(v), given)


def _worlds_and_degrees(v: Values) -> Candidates:
    return {
        "world": _worlds(v),
        "parallel.tensor": _degrees(v, "pipeline", "context"),
        "parallel.pipeline": _degrees(v, "tensor", "context"),
        "parallel.context": _degrees(v, "tensor", "pipeline"),
    }


def _virtual_stages(v: Values) -> Candidates:
    fewest = default_virtual_stages(v("parallel.schedule")) if v("parallel.pipeline") > 1 else 1
    return {"parallel.virtual_stages": [fewest], "parallel.schedule": _SCHEDULES}


def _pipeline(v: Values) -> Candidates:
    layers, each = v("model.layers"), stages_per_rank(v)
    candidates: Candidates = {_PIPELINE: _pipelines(v, layers // each), "parallel.schedule": _SCHEDULES}
    if v("parallel.virtual_stages") is not None:
        candidates["parallel.virtual_stages"] = range(1, min(each, _WINDOW) + 1)
    if layers < 2 * each:  # only one pipeline rank could have that many stages
        candidates["model.layers"] = [v(_PIPELINE) * each]
    return candidates


def _split(v: Values) -> Candidates:
    counts, each = v("parallel.split"), stages_per_rank(v)
    splits = [None, *_even_splits(v("model.layers"), v(_PIPELINE) * each)]
    # Without a split there is nothing to refuse.
    return {"parallel.split": splits, _PIPELINE: [max(1, len(counts or ()) // each)]}


def _even_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    # The remainder goes to the first stages.
    count, rest = divmod(layers, stages)
    return [(count + 1,) * rest + (count,) * (stages - rest)] if count else []


def _data_parallel_batch(v: Values) -> Iterator[Problem]:
    whole, micro, degree = v("batch.global_batch"), v("batch.micro_batch"), data_degree(v)
    path = "batch.global_batch" if whole % degree else "batch.micro_batch"
    candidates: Candidates = {
        "batch.micro_batch": _micro_batch_sizes(v),
        "batch.global_batch": _multiples(micro * degree, whole),
        "world": _worlds(v),
    }
    yield from refusal(v, path, data_parallel_batch, candidates, (*_DEGREES, micro_batches))


def _full_pipeline(v: Values) -> Candidates:
    count = max(micro_batch_counts(v))
    return {
        _PIPELINE: _pipelines(v, count),
        "batch.micro_batch": _micro_batch_sizes(v),
        "parallel.schedule": ["gpipe"],
        "batch.global_batch": [v("batch.global_batch") // count * v(_PIPELINE)],  # just enough of them
        **({"world": _worlds(v)} if "world" in v else {}),
    }


def _whole_rounds(v: Values) -> Candidates:
    whole = v("batch.global_batch")
    return {
        "parallel.schedule": _SCHEDULES,
        "batch.micro_batch": _micro_batch_sizes(v),
        "batch.global_batch": _multiples(whole // max(micro_batch_counts(v)), whole),
    }


def _ramp(v: Values) -> Iterator[Problem]:
    # Each stage's batch is checked as if it were the global batch; the stages have to grow up to it.
    sizes = [stage.global_batch for stage in v("batch.ramp")]
    for number, (before, size, following) in enumerate(
        zip([0, *sizes], sizes, [*sizes[1:], v("batch.global_batch")], strict=False)
    ):
        path, at_stage = f"batch.ramp.{number}.global_batch", v.having("batch.global_batch", size)
        if size >= following:
            last = number == len(sizes) - 1
            reason = f"{'batch.global_batch' if last else 'the batch of the next stage'} is {following}; a ramp grows."
            yield Problem(path, reason, f"Use less than {following}, or remove the stage.", size, True)
        # If the final batch fails too, its own problem says so.
        failing = [check for check in STAGE_CHECKS if holds(check, v) and not holds(check, at_stage)]
        for check in failing[:1]:
            unit = v("batch.micro_batch") * (data_degree(v) if "world" in v else 1)
            candidates = [each for each in _multiples(unit, size) if before < each < following]
            for found in refusal(at_stage, "batch.global_batch", check, {"batch.global_batch": candidates}):
                (reason,) = stage_reasons(check, at_stage)
                fixes = tuple(Fix(path, fix.value) for fix in found.fixes)
                yield replace(found, path=path, reason=reason, remedy=found.remedy or "Remove the stage.", fixes=fixes)


_TENSOR, _CONTEXT, _REPLICAS = "parallel.tensor", "parallel.context", "parallel.replicas"
_PIPELINE, _MICRO = "parallel.pipeline", "batch.micro_batch"
LAYOUT_RULES: tuple[Rule, ...] = (
    _rule(_TENSOR, tensor_degree, lambda v: {_TENSOR: divisors(v("model.heads"))}),
    _rule(
        _TENSOR,
        sequence_shards,
        lambda v: {_TENSOR: divisors(v("model.heads")), "parallel.sequence": [False]},
        (tensor_degree, context_chunks),
    ),
    _rule(_CONTEXT, context_chunks, lambda v: {_CONTEXT: [1, *_divided(v("data.sequence_length"), 2)]}),
    _rule("parallel.virtual_stages", virtual_stages, _virtual_stages),
    _rule(_PIPELINE, pipeline_layers, _pipeline, (virtual_stages,)),
    _rule("parallel.split", split, _split, _STAGES),
    _rule("parallel.zero", zero_stage, lambda v: {"parallel.zero": (1, 3), "parallel.schedule": _SCHEDULES}),
    _rule(_REPLICAS, replicas_of_something, lambda v: {_REPLICAS: [1], "parallel.zero": (1, 2, 3)}),
    _rule("world", world_of_models, _worlds_and_degrees, _DEGREES),
    _rule(
        _REPLICAS,
        replicas_of_data,
        lambda v: {_REPLICAS: divisors(data_degree(v))},
        (*_DEGREES, replicas_of_something),
    ),
    _rule(_MICRO, micro_batches, lambda v: {_MICRO: divisors(v("batch.global_batch"))}),
    _data_parallel_batch,
    _rule(_PIPELINE, full_pipeline, _full_pipeline, _STAGES),
    _rule("parallel.schedule", whole_rounds, _whole_rounds, _STAGES),
    _ramp,
)


def _rounding(v: Values) -> Iterator[Problem]:
    # Devices round with random numbers of their own. Two ranks that store the same element would store different values
    # after the first step, and more so after every further one.
    if v("precision.rounding") != "hardware":
        return
    path, mode = "precision.rounding", v("precision.mode")
    if mode != "bf16-sr":
        yield Problem(
            path, f"precision.mode={mode} rounds nothing stochastically.", "Use precision.mode=bf16-sr.", v(path), True
        )
    if v("run.deterministic"):
        reason = "the state of a device's random numbers is in no checkpoint, so a resumed run has other bits."
        yield Problem(path, reason, "Accept that with run.deterministic=false, or use software.", v(path), True)
    for field, stored, remedy in _copies(v):
        reason = f"precision.rounding=hardware rounds copies apart: {stored}."
        yield Problem(field, reason, f"{remedy}, or precision.rounding=software.", v(field), True)


def _copies(v: Values) -> Iterator[tuple[str, str, str]]:
    """Yield fields that make several ranks store the same elements: field, what they store, remedy."""
    if v("parallel.tensor") > 1:
        yield "parallel.tensor", "every tensor-parallel rank stores the norm weights", "Use parallel.tensor=1"
    if v("parallel.replicas") > 1:
        yield "parallel.replicas", "every replica stores all weights", "Use parallel.replicas=1"
    ranks = v("parallel.context") * (data_degree(v) if "world" in v else 1)
    if v("parallel.zero") == 0 and ranks > 1:
        yield "parallel.zero", "every data- and context-parallel rank stores all weights", "Use parallel.zero=1"
    if v("parallel.pipeline") > 1 and v("model.tie_embeddings"):
        stored = "first and last stage store the tied embedding"
        yield "parallel.pipeline", stored, "Use parallel.pipeline=1, model.tie_embeddings=false"


ROUNDING_RULES: tuple[Rule, ...] = (_rounding,)


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
    whole = math.gcd(v("batch.global_batch"), *(stage.global_batch for stage in v("batch.ramp")))
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
    end = v("schedule.horizon_steps") or steps_of(v)
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
