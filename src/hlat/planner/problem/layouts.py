"""Layouts that a model may be trained in on so many devices: every one that the rules of recipes allow.

    PlanRequest -> degrees that divide the devices -> Candidate, if all checks of the layout hold

The rules are those of ``hlat check`` (config/rules/layout_checks.py), so that what is found here is a valid recipe.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal, get_args

from hlat.config.rules import LAYOUT_CHECKS, Check, Values, divisors, holds
from hlat.config.sections import INTERLEAVED, ZERO_BUBBLE, ParallelConfig, Schedule, default_virtual_stages
from hlat.parallel.stages import Cut
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import RECOMPUTE_POLICIES, RecomputePolicy, StepLayout
from hlat.runtime import PlanError

_MOST_CONTEXT = 16
_SHORTEST_CHUNK = 4096  # tokens of a context rank: below, other axes do the same for less talk
_MOST_VIRTUAL = 8
# Chips on which no published run shards gradients or weights, or takes backward passes apart: nothing tells the time
# model what that would cost there. A layout that is asked for by name is predicted all the same.
_CAUTIOUS = ("trainium",)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_SPAN = 2  # tensor groups of up to so many domains are tried: what they lose is part of an explanation


@dataclass(frozen=True)
class Candidate:
    """One layout."""

    tensor: int
    pipeline: int
    context: int
    data: int
    virtual: int
    zero: int
    micro_batch: int
    recompute: RecomputePolicy
    schedule: Schedule = "1f1b"

    @property
    def world(self) -> int:
        """Devices."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def parallel(self) -> ParallelConfig:
        """The parallel section of a recipe."""
        return _parallel(self.tensor, self.pipeline, self.context, self.virtual, self.schedule, self.zero)

    def cut(self, request: PlanRequest) -> Cut:
        """As counts of stages and bytes take it."""
        return Cut(
            request.model,
            self.parallel,
            self.world,
            request.sequence,
            request.global_batch,
            self.micro_batch,
            request.mode,
            self.recompute,
        )

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches per step of a data-parallel rank."""
        return global_batch // (self.micro_batch * self.data)

    def split(self, request: PlanRequest) -> StepLayout:
        """As the formulas take it."""
        return StepLayout(
            self.tensor,
            self.pipeline,
            self.context,
            self.data,
            self.virtual,
            self.zero,
            self.micro_batch,
            request.global_batch,
            request.sequence,
            sequence_parallel=self.tensor > 1,
            recompute=self.recompute,
            split_backward=self.schedule in ZERO_BUBBLE,
        )

    def __str__(self) -> str:
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}"]
        parts += [f"context {self.context}"] * (self.context > 1)
        parts += [f"{self.virtual} stages per rank"] * (self.virtual > 1)
        parts += [self.schedule] * (self.pipeline > 1 and self.schedule not in ("1f1b", "interleaved-1f1b"))
        parts += [f"ZeRO {self.zero}", f"micro-batch {self.micro_batch}", f"recompute {self.recompute}"]
        return ", ".join(parts)


@lru_cache(maxsize=1024)
def _parallel(
    tensor: int, pipeline: int, context: int, virtual: int, schedule: Schedule, zero: Literal[0, 1, 2, 3]
) -> ParallelConfig:
    """Layouts of a search share their sections: to validate one costs as much as to count its bytes."""
    return ParallelConfig(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual_stages=virtual if virtual > 1 else None,
        schedule=schedule,
        zero=zero,
    )


def candidates(request: PlanRequest) -> Iterator[Candidate]:
    """Every layout of the request's devices, with every ZeRO stage, micro-batch and policy."""
    for tensor, pipeline, context in _degrees(request):
        data = request.cluster.devices // (tensor * pipeline * context)
        if request.global_batch % data:
            continue
        share = request.global_batch // data
        for (virtual, schedule), zero, micro in product(
            _schedules(request, pipeline), _zeros(request, pipeline, data * context), _MICRO_BATCHES
        ):
            if share % micro:
                continue
            one = Candidate(tensor, pipeline, context, data, virtual, zero, micro, "none", schedule)
            if all(holds(check, _values(request, one)) for check in LAYOUT_CHECKS):
                for recompute in RECOMPUTE_POLICIES:
                    yield replace(one, recompute=recompute)


def parse_layout(text: str, request: PlanRequest, option: str = "--layout") -> Candidate:
    """A layout from ``tp=8,pp=1,...``; what is not said is 1, ZeRO 1, micro-batch 1, 1F1B, nothing recomputed.

    Raises:
        PlanError: not of that form, a name or a value that does not exist, or a layout that cannot be.
    """
    values = _words(text, option)
    degrees = [values.get(name, 1) for name in ("tensor", "pipeline", "context")]
    data, rest = divmod(request.cluster.devices, degrees[0] * degrees[1] * degrees[2])
    stated = values.get("data", data)
    if rest or stated != data:
        raise PlanError(
            f"{option} {text}: tensor {degrees[0]} x pipeline {degrees[1]} x context {degrees[2]} x data {stated} is "
            f"not the number of devices of {request.cluster.name}, {request.cluster.devices}"
        )
    recompute: RecomputePolicy = values.get("recompute", "none")
    schedule: Schedule = values.get("schedule", "interleaved-1f1b" if values.get("virtual", 1) > 1 else "1f1b")
    one = Candidate(
        degrees[0],
        degrees[1],
        degrees[2],
        data,
        values.get("virtual", default_virtual_stages(schedule)),
        values.get("zero", 1),
        values.get("micro_batch", 1),
        recompute,
        schedule,
    )
    reasons = layout_violations(request, one)
    if reasons:
        raise PlanError(f"{option} {text}: this layout is not possible:\n" + "\n".join(f"  {one}" for one in reasons))
    return one


_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "dp": "data",
    "vpp": "virtual",
    "mbs": "micro_batch",
    "micro": "micro_batch",
    "ckpt": "recompute",
}
_FIELDS = ("tensor", "pipeline", "context", "data", "virtual", "zero", "micro_batch", "recompute", "schedule")
_SHORT = {"interleaved": "interleaved-1f1b", "zero-bubble": "interleaved-zero-bubble"}
_CHOICES = {"recompute": RECOMPUTE_POLICIES, "schedule": get_args(Schedule)}


def _words(text: str, option: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = word.partition("=")
        name = _NAMES.get(name.strip(), name.strip())
        if not equals or name not in _FIELDS:
            known = ", ".join((*_NAMES, *_FIELDS))
            raise PlanError(f"{option}: {word!r} is not NAME=VALUE with one of the names {known}")
        if name in _CHOICES:
            value = _SHORT.get(value, value)
            if value not in _CHOICES[name]:
                raise PlanError(f"{option}: {word}: {name} is one of {', '.join(_CHOICES[name])}")
            values[name] = value
        elif (
            not value.strip().isdecimal() or (int(value) < 1 and name != "zero") or (name == "zero" and int(value) > 3)
        ):
            raise PlanError(f"{option}: {word}: must be a whole number, at least 1 (zero: 0 to 3)")
        else:
            values[name] = int(value)
    return values


def layout_violations(request: PlanRequest, one: Candidate) -> list[str]:
    """Why a layout cannot be, in words; nothing where it can."""
    values = _values(request, one)
    failing = [check for check in LAYOUT_CHECKS if not holds(check, values)]
    return [f"{_called(check)}: {reason}" for check in failing for reason in check(values)]


def _called(check: Check) -> str:
    """A check is named after what it asks about."""
    return check.__name__.replace("_", " ")


def _values(request: PlanRequest, one: Candidate) -> Values:
    model = request.model
    return Values(
        {
            "world": one.world,
            "model.heads": model.heads,
            "model.kv_heads": model.kv_heads,
            "model.intermediate_size": model.intermediate_size,
            "model.vocab_size": model.vocab_size,
            "model.layers": model.layers,
            "data.sequence_length": request.sequence,
            "batch.global_batch": request.global_batch,
            "batch.micro_batch": one.micro_batch,
            "parallel.tensor": one.tensor,
            "parallel.sequence": True,
            "parallel.pipeline": one.pipeline,
            "parallel.virtual_stages": one.virtual if one.virtual > 1 else None,
            "parallel.schedule": one.schedule,
            "parallel.split": None,
            "parallel.context": one.context,
            "parallel.zero": one.zero,
            "parallel.replicas": 1,
        }
    )


def _degrees(request: PlanRequest) -> Iterator[tuple[int, int, int]]:
    devices, domain = request.cluster.devices, request.cluster.domain
    groups = request.cluster.instance.groups
    tensors = [t for t in divisors(request.model.heads) if t <= _SPAN * domain and devices % t == 0]
    tensors = [t for t in tensors if not groups or t in groups]
    for tensor in tensors:
        for pipeline in (p for p in divisors(devices // tensor) if p <= request.model.layers):
            rest = devices // tensor // pipeline
            for context in (c for c in divisors(rest) if c <= _MOST_CONTEXT):
                if context == 1 or request.sequence // context >= _SHORTEST_CHUNK:
                    yield tensor, pipeline, context


def _schedules(request: PlanRequest, pipeline: int) -> list[tuple[int, Schedule]]:
    """Stages per rank and schedules."""
    if pipeline == 1:
        return [(1, "1f1b")]
    each = request.model.layers // pipeline
    several = [count for count in range(2, min(_MOST_VIRTUAL, each) + 1) if each % count == 0]
    if request.cluster.chip.family in _CAUTIOUS:
        return [(1, "1f1b"), *((count, "interleaved-1f1b") for count in several)]
    found: list[tuple[int, Schedule]] = [(1, "1f1b"), *product(several, INTERLEAVED)]
    return found + ([(2, "zbv")] if 2 in several else [])


def _zeros(request: PlanRequest, pipeline: int, shards: int) -> list[int]:
    if shards == 1:
        return [0]
    if request.cluster.chip.family in _CAUTIOUS:
        return [0, 1]
    return [0, 1, 2, 3] if pipeline == 1 else [0, 1, 3]
