"""Memory of published runs, as the source's instrument shows it.

    run -> instrument (memory_instrument.py) -> bytes of its program (program_memory.py), and what the instrument adds
        -> GiB;  None with the reason if the reading cannot be compared

Totals that a source computed, and Megatron-DeepSpeed's memory, follow Korthikanti's formulas (counted_memory.py), the
latter with the one constant that was derived from measured memory.
"""

import numpy as np

from hlat.planner.problem.workload import WorkloadColumns
from published_runs.counted_memory import counted_bytes
from published_runs.memory_instrument import MemoryReading, read_instrument
from published_runs.program_memory import program_bytes
from published_runs.reader import find_framework
from published_runs.runs import PublishedRun

_GIB = 1 << 30
_DEEPSPEED = "Megatron-DeepSpeed"

DEEPSPEED_GIB = 9.4
"""GiB beside the counted memory of Megatron-DeepSpeed in ``nvidia-smi``: median of BigScience's 69 readings."""
_ALLOCATOR_SHARE = 0.06
"""Rounding and fragmentation of torch's caching allocator, as a share of transient memory: that of hlat's own plans."""
_RUNTIME_GIB = 2.0
"""CUDA context, code of kernels, NCCL's buffers: that of hlat's own plans (planner/memory.py)."""


def framework_of(run: PublishedRun) -> str:
    """Name of the framework of a run."""
    return find_framework(run.row.get("framework") or "").name


def memory_reading(run: PublishedRun) -> MemoryReading:
    """Instrument of a run's memory reading, and how it was found out or why there is none."""
    return read_instrument(run.memory_kind, run.row)


def constant_gib(run: PublishedRun) -> float:
    """GiB that are added to the counted bytes, whatever their number."""
    if memory_reading(run).instrument not in (None, "device"):
        return 0.0
    return DEEPSPEED_GIB if framework_of(run) == _DEEPSPEED else _RUNTIME_GIB


def predicted_gib(runs: list[PublishedRun]) -> list[float]:
    """GiB that the source's instrument shows of the device that needs most; a device's where none is stated."""
    return [_predicted(run) for run in runs]


def _predicted(run: PublishedRun) -> float:
    instrument = memory_reading(run).instrument
    if instrument == "computed" or framework_of(run) == _DEEPSPEED:
        counted = counted_bytes(WorkloadColumns([run.workload]), np.array([_gradient_bytes(run)]))
        return float(counted[0]) / _GIB + constant_gib(run)
    program = program_bytes(run)
    slack = 0.0 if instrument == "allocated" else _ALLOCATOR_SHARE
    return (program.state + program.transient * (1 + slack)) / _GIB + constant_gib(run)


def _gradient_bytes(run: PublishedRun) -> float:
    """Bytes per gradient element: Megatron's fp32, DeepSpeed's as weights, plus fp32 sums in its bf16 optimizer."""
    precision = run.row.get("precision") or ""
    if "fp32 grad accumulation" in precision:
        return 6.0
    return 2.0 if precision == "fp16" and framework_of(run) == _DEEPSPEED else 4.0
