"""A layout in one word, as ``--layout`` takes it.

Candidate --layout_text--> "tp=8,pp=4,zero=3" --parse_layout--> Candidate | PlanError
"""

from typing import Any, get_args

from hlat.config import Schedule, default_virtual_stages
from hlat.planner.problem.layouts import Candidate, layout_violations, parallel_section
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import RECOMPUTE_POLICIES, RecomputePolicy
from hlat.runtime.errors import PlanError


def layout_text(layout: Candidate) -> str:
    """Write a layout as ``parse_layout`` reads it, without its defaults."""
    words = [f"tp={layout.tensor}"] * (layout.tensor > 1) + [f"pp={layout.pipeline}"] * (layout.pipeline > 1)
    words += [f"cp={layout.context}"] * (layout.context > 1) + [f"vpp={layout.virtual}"] * (layout.virtual > 1)
    words += [f"zero={layout.zero}"] * (layout.zero != 1) + [f"rep={layout.replicas}"] * (layout.replicas > 1)
    words += [f"mbs={layout.micro_batch}"] * (layout.micro_batch > 1)
    words += [f"recompute={layout.recompute}"] * (layout.recompute != "none")
    words += ["gather=never"] * (layout.parallel.gather_again == "never")
    implied = "interleaved-1f1b" if layout.virtual > 1 else "1f1b"
    words += [f"schedule={layout.schedule}"] * (layout.pipeline > 1 and layout.schedule != implied)
    return ",".join(words) or "tp=1"


def parse_layout(text: str, request: PlanRequest, option: str = "--layout") -> Candidate:
    """Parse a layout such as ``tp=8,pp=1``.

    Defaults: degrees 1, data parallelism over the remaining devices, ZeRO 1, micro-batch 1, 1F1B, no recomputation, but
    inputs that sequence parallelism gathers are gathered again in backward.

    Args:
        text: comma-separated ``name=value`` pairs.
        request: model and cluster that the layout is for.
        option: command-line option to name in errors.

    Raises:
        PlanError: malformed text, an unknown name or value, or a layout that fails a check.
    """
    values = _parse_pairs(text, option)
    degrees = (values.get("tensor", 1), values.get("pipeline", 1), values.get("context", 1))
    data, rest = divmod(request.cluster.devices, degrees[0] * degrees[1] * degrees[2])
    stated = values.get("data", data)
    if rest or stated != data:
        raise PlanError(
            f"{option} {text}: tensor {degrees[0]} x pipeline {degrees[1]} x context {degrees[2]} x data {stated} is "
            f"not the number of devices of {request.cluster.name}, {request.cluster.devices}. Give degrees whose "
            f"product divides it, as in tp={_largest_divisor(request.cluster.devices, degrees[0])}"
        )
    recompute: RecomputePolicy = values.get("recompute", "none")
    schedule: Schedule = values.get("schedule", "interleaved-1f1b" if values.get("virtual", 1) > 1 else "1f1b")
    virtual, zero = values.get("virtual", default_virtual_stages(schedule)), values.get("zero", 1)
    gather_again = values.get("gather_again", "auto")
    parallel = parallel_section(*degrees, virtual, schedule, zero, values.get("replicas", 1), gather_again)
    candidate = Candidate(parallel, data, values.get("micro_batch", 1), recompute)
    reasons = layout_violations(request, candidate)
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise PlanError(f"{option} {text}: this layout is not possible:\n{listed}")
    return candidate


_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "dp": "data",
    "vpp": "virtual",
    "mbs": "micro_batch",
    "micro": "micro_batch",
    "ckpt": "recompute",
    "rep": "replicas",
    "gather": "gather_again",
}
_FIELDS = (
    "tensor",
    "pipeline",
    "context",
    "data",
    "virtual",
    "zero",
    "replicas",
    "micro_batch",
    "recompute",
    "gather_again",
    "schedule",
)
_SHORT = {"interleaved": "interleaved-1f1b", "zero-bubble": "interleaved-zero-bubble"}
_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE_POLICIES,
    "gather_again": ("auto", "never"),
    "schedule": get_args(Schedule),
}


def _largest_divisor(devices: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``."""
    return next(degree for degree in range(min(devices, max(most, 1)), 0, -1) if devices % degree == 0)


def _parse_pairs(text: str, option: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        name, equals, value = pair.partition("=")
        name = _NAMES.get(name.strip(), name.strip())
        if not equals or name not in _FIELDS:
            known = ", ".join((*_NAMES, *_FIELDS))
            raise PlanError(f"{option}: {pair!r} is not NAME=VALUE; the names are {known}")
        if name in _CHOICES:
            value = _SHORT.get(value, value)
            if value not in _CHOICES[name]:
                raise PlanError(f"{option}: {pair}: {name} is one of {', '.join(_CHOICES[name])}")
            values[name] = value
        elif (
            not value.strip().isdecimal() or (int(value) < 1 and name != "zero") or (name == "zero" and int(value) > 3)
        ):
            raise PlanError(f"{option}: {pair}: must be an integer of at least 1 (zero: 0 to 3)")
        else:
            values[name] = int(value)
    return values
