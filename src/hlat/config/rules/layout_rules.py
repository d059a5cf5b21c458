"""Validation of ``parallel``: the field to report for a failed check, and the fields to search for a fix.

    check -> wrong? -> the field, candidates for it and for the fields it depends on -> Problem with the nearest fixes

A rule that depends on a failed check is skipped, because its report would only repeat that problem.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from hlat.config.errors import Fix, Problem
from hlat.config.rules import layout_checks as checks
from hlat.config.rules.rule_context import Rule, Values, divisors, holds
from hlat.config.rules.suggest import refusal
from hlat.config.sections.parallel import Schedule, default_virtual_stages

_STAGES = (checks.virtual_stages, checks.pipeline_layers)
_DEGREES = (checks.tensor_degree, checks.context_chunks, checks.sequence_shards, *_STAGES)
_WINDOW = 32  # candidates on either side if any number is possible

# In order of preference: 1f1b demands least of model and batch, gpipe needs the most memory.
_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved-1f1b", "gpipe", "interleaved-zero-bubble", "zbv")

Candidates = dict[str, Iterable[Any]]


def _multiples(unit: int, near: int) -> list[int]:
    """Multiples of ``unit`` around ``near``."""
    below = near // unit
    return [unit * count for count in range(max(1, below - _WINDOW), below + _WINDOW + 2)]


def _divided(whole: int, by: int) -> list[int]:
    """Divisors of whole / by; none if the quotient is no integer."""
    return [] if whole < by or whole % by else divisors(whole // by)


def _worlds(v: Values) -> list[int]:
    """Numbers of processes that hold complete models: the nearest ones, and those that divide the batch."""
    ranks = checks.model_ranks(v)
    shares = _divided(v("batch.global_batch"), v("batch.micro_batch"))
    return [*_multiples(ranks, v("world")), *(ranks * share for share in shares)]


def _degrees(v: Values, *others: str) -> list[int]:
    """Degrees of an axis that, together with the other degrees, divide the world size; none if that is not given."""
    return _divided(v("world"), math.prod(v(f"parallel.{name}") for name in others)) if "world" in v else []


def _pipelines(v: Values, most: int) -> list[int]:
    """Candidate pipeline-parallel degrees, at most ``most``."""
    return [1, *range(max(1, most - _WINDOW), most + 1), *_degrees(v, "tensor", "context")]


def _micro_batch_sizes(v: Values) -> list[int]:
    """Candidate micro-batch sizes: divisors of a data-parallel rank's share of the batch."""
    return _divided(v("batch.global_batch"), checks.data_degree(v) if "world" in v else 1)


def _tensor(v: Values) -> Iterator[Problem]:
    path = "parallel.tensor"
    yield from refusal(v, path, checks.tensor_degree, {path: divisors(v("model.heads"))})


def _context(v: Values) -> Iterator[Problem]:
    path = "parallel.context"
    yield from refusal(v, path, checks.context_chunks, {path: [1, *_divided(v("data.sequence_length"), 2)]})


def _sequence(v: Values) -> Iterator[Problem]:
    path = "parallel.tensor"
    candidates: Candidates = {path: divisors(v("model.heads")), "parallel.sequence": [False]}
    yield from refusal(v, path, checks.sequence_shards, candidates, (checks.tensor_degree, checks.context_chunks))


def _virtual_stages(v: Values) -> Iterator[Problem]:
    path, pipeline = "parallel.virtual_stages", v("parallel.pipeline")
    fewest = default_virtual_stages(v("parallel.schedule")) if pipeline > 1 else 1
    yield from refusal(v, path, checks.virtual_stages, {path: [fewest], "parallel.schedule": _SCHEDULES})


def _pipeline(v: Values) -> Iterator[Problem]:
    path, layers, each = "parallel.pipeline", v("model.layers"), checks.stages_per_rank(v)
    candidates: Candidates = {path: _pipelines(v, layers // each), "parallel.schedule": _SCHEDULES}
    if v("parallel.virtual_stages") is not None:
        candidates["parallel.virtual_stages"] = range(1, min(each, _WINDOW) + 1)
    if layers < 2 * each:  # only one pipeline rank could have that many stages
        candidates["model.layers"] = [v(path) * each]
    yield from refusal(v, path, checks.pipeline_layers, candidates, (checks.virtual_stages,))


def _split(v: Values) -> Iterator[Problem]:
    path, counts = "parallel.split", v("parallel.split")
    if counts is None:
        return
    pipeline, each = v("parallel.pipeline"), checks.stages_per_rank(v)
    splits = [None, *_even_splits(v("model.layers"), pipeline * each)]
    candidates: Candidates = {path: splits, "parallel.pipeline": [max(1, len(counts) // each)]}
    yield from refusal(v, path, checks.split, candidates, _STAGES)


def _even_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Layers divided over stages, the remainder on the first ones; none if there are fewer layers than stages."""
    count, rest = divmod(layers, stages)
    return [(count + 1,) * rest + (count,) * (stages - rest)] if count else []


def _zero(v: Values) -> Iterator[Problem]:
    path = "parallel.zero"
    yield from refusal(v, path, checks.zero_stage, {path: (1, 3), "parallel.schedule": _SCHEDULES})


def _replicas_of_something(v: Values) -> Iterator[Problem]:
    path = "parallel.replicas"
    yield from refusal(v, path, checks.replicas_of_something, {path: [1], "parallel.zero": (1, 2, 3)})


def _world(v: Values) -> Iterator[Problem]:
    candidates: Candidates = {
        "world": _worlds(v),
        "parallel.tensor": _degrees(v, "pipeline", "context"),
        "parallel.pipeline": _degrees(v, "tensor", "context"),
        "parallel.context": _degrees(v, "tensor", "pipeline"),
    }
    yield from refusal(v, "world", checks.world_of_models, candidates, _DEGREES)


def _replicas_of_data(v: Values) -> Iterator[Problem]:
    path = "parallel.replicas"
    candidates: Candidates = {path: divisors(checks.data_degree(v))}
    given = (*_DEGREES, checks.replicas_of_something)
    yield from refusal(v, path, checks.replicas_of_data, candidates, given)


def _micro_batches(v: Values) -> Iterator[Problem]:
    path = "batch.micro_batch"
    yield from refusal(v, path, checks.micro_batches, {path: divisors(v("batch.global_batch"))})


def _data_parallel_batch(v: Values) -> Iterator[Problem]:
    whole, micro, degree = v("batch.global_batch"), v("batch.micro_batch"), checks.data_degree(v)
    path = "batch.global_batch" if whole % degree else "batch.micro_batch"
    candidates: Candidates = {
        "batch.micro_batch": _micro_batch_sizes(v),
        "batch.global_batch": _multiples(micro * degree, whole),
        "world": _worlds(v),
    }
    yield from refusal(v, path, checks.data_parallel_batch, candidates, (*_DEGREES, checks.micro_batches))


def _full_pipeline(v: Values) -> Iterator[Problem]:
    path, count = "parallel.pipeline", max(checks.micro_batch_counts(v))
    candidates: Candidates = {
        path: _pipelines(v, count),
        "batch.micro_batch": _micro_batch_sizes(v),
        "parallel.schedule": ["gpipe"],
        "batch.global_batch": [v("batch.global_batch") // count * v(path)],  # just enough of them
        **({"world": _worlds(v)} if "world" in v else {}),
    }
    yield from refusal(v, path, checks.full_pipeline, candidates, _STAGES)


def _whole_rounds(v: Values) -> Iterator[Problem]:
    path, whole = "parallel.schedule", v("batch.global_batch")
    candidates: Candidates = {
        path: _SCHEDULES,
        "batch.micro_batch": _micro_batch_sizes(v),
        "batch.global_batch": _multiples(whole // max(checks.micro_batch_counts(v)), whole),
    }
    yield from refusal(v, path, checks.whole_rounds, candidates, _STAGES)


def _ramp(v: Values) -> Iterator[Problem]:
    """Check the batch of each stage as if it were the global batch; the stages have to grow up to it."""
    sizes = [stage.global_batch for stage in v("batch.ramp")]
    for number, (before, size, following) in enumerate(
        zip([0, *sizes], sizes, [*sizes[1:], v("batch.global_batch")], strict=False)
    ):
        path, at_stage = f"batch.ramp.{number}.global_batch", v.having("batch.global_batch", size)
        if size >= following:
            last = number == len(sizes) - 1
            reason = f"{'batch.global_batch' if last else 'the batch of the next stage'} is {following}; a ramp grows."
            yield Problem(path, reason, f"Use less than {following}, or remove the stage.", size, True)
        failing = [check for check in checks.STAGE_CHECKS if holds(check, v) and not holds(check, at_stage)]
        for check in failing[:1]:
            unit = v("batch.micro_batch") * (checks.data_degree(v) if "world" in v else 1)
            candidates = [each for each in _multiples(unit, size) if before < each < following]
            for found in refusal(at_stage, "batch.global_batch", check, {"batch.global_batch": candidates}):
                (reason,) = checks.stage_reasons(check, at_stage)
                fixes = tuple(Fix(path, fix.value) for fix in found.fixes)
                yield replace(found, path=path, reason=reason, remedy=found.remedy or "Remove the stage.", fixes=fixes)


LAYOUT_RULES: tuple[Rule, ...] = (
    _tensor,
    _sequence,
    _context,
    _virtual_stages,
    _pipeline,
    _split,
    _zero,
    _replicas_of_something,
    _world,
    _replicas_of_data,
    _micro_batches,
    _data_parallel_batch,
    _full_pipeline,
    _whole_rounds,
    _ramp,
)
