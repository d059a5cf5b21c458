"""Memory of published runs: published formulas for what other frameworks allocate, and one constant per framework.

    runs -> counted bytes (counted_memory.py) + constant of the framework (contexts, collective buffers, fragmentation)

Only the constant is derived from measured memory.
"""

import numpy as np

from hlat.planner.calibration.counted_memory import OTHER_GIB, counted_bytes
from hlat.planner.calibration.published_runs import PublishedRun
from hlat.planner.problem import Column, WorkloadColumns

_GIB = 1 << 30

_FRAMEWORKS = {
    "Megatron-DeepSpeed": "Megatron-DeepSpeed",
    "DeepSpeed+Megatron": "Megatron-DeepSpeed",
    "no FlashAttention": "analytic",
    "torchtitan": "torchtitan",
    "InternEvo": "InternEvo",
    "Composer": "Composer",
    "NeMo": "NeMo",
    "Megatron": "Megatron",
}
CONSTANTS_GIB = {"Megatron-DeepSpeed": 9.4, "analytic": 0.0}
"""By framework: median of measured minus counted memory in BigScience's 69 readings; 0 for computed totals."""


def framework_of(run: PublishedRun) -> str:
    """Name of the framework whose constant applies to a run."""
    framework = run.row.get("framework") or ""
    return next((name for words, name in _FRAMEWORKS.items() if words in framework), "other")


def constant_gib(run: PublishedRun) -> float:
    """GiB that a framework allocates besides the counted memory."""
    return CONSTANTS_GIB.get(framework_of(run), OTHER_GIB)


def predicted_gib(runs: list[PublishedRun]) -> list[float]:
    """GiB on the device that needs most, for each run."""
    if not runs:
        return []
    return [float(size) / _GIB + constant_gib(run) for run, size in zip(runs, counted_memory(runs), strict=True)]


def counted_memory(runs: list[PublishedRun]) -> Column:
    """Bytes on the device that needs most, for each run, without the constant of the framework."""
    return counted_bytes(
        WorkloadColumns([run.workload for run in runs]), np.array([_gradient_bytes(run) for run in runs])
    )


def _gradient_bytes(run: PublishedRun) -> float:
    """Bytes per gradient element: Megatron's fp32, DeepSpeed's as weights, plus fp32 sums in its bf16 optimizer."""
    precision = run.row.get("precision") or ""
    if "fp32 grad accumulation" in precision:
        return 6.0
    return 2.0 if precision == "fp16" and framework_of(run) == "Megatron-DeepSpeed" else 4.0
