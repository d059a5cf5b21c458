"""Execution of a planned step: the attention kernel and the compiler that a run of this plan would get on its chips.

request, candidate -> the chip's backend (``hlat.runtime.backend``), asked as a run asks it -> PlannedExecution
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from hlat.config import compile_obstacle
from hlat.model import attention_heads
from hlat.parallel import compile_refusal
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.runnable import chip_backend, why_not_runnable
from hlat.precision import MODES
from hlat.runtime.backend.base import AttentionHeads, AttentionKernel, Backend

_ELSEWHERE = torch.device("meta")  # backends answer for the chip, not for a device that is here


@dataclass(frozen=True)
class PlannedExecution:
    """Decisions of a run on its device.

    Attributes:
        attention: kernel of attention; None on chips or in number formats that hlat does not run.
        deterministic: ``run.deterministic``, resolved.
        compiled: True if blocks are compiled.
    """

    attention: AttentionKernel | None
    deterministic: bool
    compiled: bool


def planned_execution(request: PlanRequest, candidate: Candidate) -> PlannedExecution:
    """Decide as a run of this request in this layout does."""
    chip, recipe = request.cluster.chip, request.recipe
    asked = "auto" if recipe is None else recipe.run.compile
    layout, backend = candidate.parallel, chip_backend(chip)
    if backend is None:
        refusal = compile_obstacle(layout.pipeline, layout.schedule)
    else:
        refusal = compile_refusal(layout, MODES[request.mode].compute, 0.0, candidate.world, backend, _ELSEWHERE)
    heads = attention_heads(
        request.model,
        request.mode,
        request.sequence,
        isolate=recipe is not None and recipe.data.isolate,
        tensor=candidate.tensor,
        context=candidate.context,
    )
    compiled = asked == "blocks" or (asked == "auto" and not refusal)
    if backend is None or why_not_runnable(chip, request.mode):
        return PlannedExecution(None, request.deterministic is not False, compiled)
    attention, deterministic = _attention(backend, heads, request.deterministic)
    return PlannedExecution(attention, deterministic, compiled)


@lru_cache  # a search asks for thousands of layouts, with few kinds of heads
def _attention(backend: Backend, heads: AttentionHeads, deterministic: bool | None) -> tuple[AttentionKernel, bool]:
    if deterministic is None:
        deterministic = backend.deterministic_by_default(heads, _ELSEWHERE)
    return backend.attention_kernel(heads, deterministic, _ELSEWHERE), deterministic
