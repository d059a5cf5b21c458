"""Memory of published runs: what their programs hold by the formulas of the field, and one constant per framework.

    WorkloadColumns of runs -> state (weights, gradients, moments by ZeRO stage) + activations + logits -> bytes of a device
    bytes + the framework's constant (contexts, buffers of collectives, what its allocator cannot use) -> prediction

hlat's own memory is counted from its own tensors (memory.py). Other programs keep other tensors: activations here are
those of Korthikanti et al. 2022, table 2 and section 5, and, for gated blocks without dropout, the same sum over the
inputs of their operations. The constant is the only number that measured memory enters.
"""

import numpy as np

from hlat.planner.calibration.published_runs import PublishedRun
from hlat.planner.problem import MATERIALIZED_SCORES, RECOMPUTE_POLICIES, Column, WorkloadColumns, layer_weights

_GIB = 1 << 30
_OPTIMIZER = 12  # bytes of a parameter: fp32 copy and two moments
_FULL = float(RECOMPUTE_POLICIES.index("full"))
_NONE = float(RECOMPUTE_POLICIES.index("none"))
_LOGIT_BYTES = 8  # 16-bit logits and their gradient, and one fp32 copy

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
"""By framework: the median of what counts leave over, of BigScience's 69 readings; nothing where a paper added up."""
_OTHER_GIB = 5.0  # where no run has been published to us: a CUDA context, NCCL's buffers, and a slack of the allocator


def framework_of(run: PublishedRun) -> str:
    """What the constant of a run is called."""
    said = run.row.get("framework") or ""
    return next((name for words, name in _FRAMEWORKS.items() if words in said), "other")


def constant_gib(run: PublishedRun) -> float:
    """What a framework takes besides what is counted, GiB."""
    return CONSTANTS_GIB.get(framework_of(run), _OTHER_GIB)


def predicted_gib(runs: list[PublishedRun]) -> list[float]:
    """GiB of the device that needs most in each run."""
    if not runs:
        return []
    return [float(size) / _GIB + constant_gib(run) for run, size in zip(runs, counted_memory(runs), strict=True)]


def counted_memory(runs: list[PublishedRun]) -> Column:
    """Bytes of the device that needs most in each run, the framework's constant not included."""
    columns = WorkloadColumns([run.work for run in runs])
    gradients = np.array([_gradient_bytes(run) for run in runs])
    first, last = (_stage(columns, gradients, at_end) for at_end in (False, True))
    most: Column = np.maximum(first, last)
    return most


def _gradient_bytes(run: PublishedRun) -> float:
    """As they are kept: Megatron's fp32, DeepSpeed's as wide as weights; its bf16 optimizer has fp32 sums besides."""
    precision = run.row.get("precision") or ""
    if "fp32 grad accumulation" in precision:
        return 6.0
    return 2.0 if precision == "fp16" and framework_of(run) == "Megatron-DeepSpeed" else 4.0


def _stage(columns: WorkloadColumns, gradients: Column, at_end: bool) -> Column:
    ends = np.where(columns.pipeline > 1, 1.0, 2.0) * columns.vocab * columns.hidden / columns.tensor
    layers = np.ceil(columns.layers / columns.pipeline)
    weights = layers * layer_weights(columns) + ends
    shards = np.maximum(1.0, columns.shards)
    whole = columns.zero < 3
    # FSDP keeps fp32 weights and gradients in shards, and gathers two layers in 16 bits.
    state = np.where(
        whole,
        weights * (2 + gradients + _OPTIMIZER / np.where(columns.zero > 0, shards, 1.0)),
        16 * weights / shards + 2 * 2 * layer_weights(columns) + 4 * layer_weights(columns),
    )
    tokens = columns.tokens
    flight = np.ones(len(columns)) if at_end else np.minimum(columns.micro_batches, columns.pipeline)
    if not at_end:
        flight = flight * np.where(
            columns.virtual > 1, 1 + (columns.pipeline - 1) / columns.pipeline / columns.virtual, 1
        )
    kept = flight * layers * _kept(columns) + (columns.recompute == _FULL) * _whole(columns)
    logits = np.where((columns.pipeline == 1) | at_end, _LOGIT_BYTES * tokens * columns.vocab / columns.tensor, 0.0)
    total: Column = state + kept + logits
    return total


def _kept(columns: WorkloadColumns) -> Column:
    """Bytes that a layer keeps of a micro-batch."""
    entry = 2 * columns.tokens * columns.hidden / np.where(columns.sequence_parallel > 0, columns.tensor, 1.0)
    return np.where(
        columns.recompute == _FULL, entry, _whole(columns) - (columns.recompute != _NONE) * _scores(columns)
    )


def _whole(columns: WorkloadColumns) -> Column:
    """The same where nothing is recomputed."""
    tokens, hidden, t = columns.tokens, columns.hidden, columns.tensor
    cut = np.where(columns.sequence_parallel > 0, t, 1.0)
    plain = hidden * (10 / cut + 24 / t)
    keys = columns.kv_heads / columns.heads
    gated = 8 * hidden / cut + (2 * hidden * (1 + 2 * keys) + 2 * hidden + 8 * columns.inner) / t
    sums = 4 * columns.heads / t * (columns.attention != MATERIALIZED_SCORES)
    total: Column = tokens * (np.where(columns.gated > 0, gated, plain) + sums) + _scores(columns)
    return total


def _scores(columns: WorkloadColumns) -> Column:
    """Of attention that writes them to memory: in 16 bits before and after softmax, and the mask of its dropout."""
    return np.where(
        columns.attention == MATERIALIZED_SCORES,
        5 * columns.heads * columns.sequence * columns.tokens / columns.tensor,
        0.0,
    )
