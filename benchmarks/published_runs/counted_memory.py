"""Bytes that training programs keep on a device: published formulas, for other programs than hlat.

    columns of runs, bytes per gradient -> state (weights, gradients, moments by ZeRO stage) + activations + logits

hlat's own memory is counted from its own tensors (planner/memory.py). Other programs keep other tensors: here
activations follow Korthikanti et al. 2022, table 2 and section 5, and for gated blocks without dropout the same sum
over the inputs of their operations.
"""

import numpy as np

from hlat.planner.problem.workload import (
    MATERIALIZED_SCORES,
    RECOMPUTE_POLICIES,
    Column,
    WorkloadColumns,
    layer_weights,
)

OTHER_GIB = 5.0
"""GiB of frameworks without published runs: CUDA context, NCCL buffers, fragmentation."""

_OPTIMIZER_BYTES = 12  # per parameter: fp32 copy and two moments
_FULL = float(RECOMPUTE_POLICIES.index("full"))
_NONE = float(RECOMPUTE_POLICIES.index("none"))
_LOGIT_BYTES = 8  # 16-bit logits and their gradient, and one fp32 copy


def counted_bytes(columns: WorkloadColumns, gradients: Column) -> Column:
    """Bytes on the device that needs most, for each workload, without what the framework adds.

    Args:
        columns: the workloads.
        gradients: bytes per gradient element.
    """
    first, last = (_stage_bytes(columns, gradients, at_end) for at_end in (False, True))
    peak: Column = np.maximum(first, last)
    return peak


def _stage_bytes(columns: WorkloadColumns, gradients: Column, at_end: bool) -> Column:
    """Bytes on a rank of the first or, ``at_end``, the last stage."""
    ends = np.where(columns.pipeline > 1, 1.0, 2.0) * columns.vocab * columns.hidden / columns.tensor
    layers = np.ceil(columns.layers / columns.pipeline)
    weights = layers * layer_weights(columns) + ends
    shards = np.maximum(1.0, columns.shards)
    unsharded_weights = columns.zero < 3
    # FSDP stores shards of fp32 weights and gradients, and gathers two layers in 16 bits.
    state = np.where(
        unsharded_weights,
        weights * (2 + gradients + _OPTIMIZER_BYTES / np.where(columns.zero > 0, shards, 1.0)),
        16 * weights / shards + 2 * 2 * layer_weights(columns) + 4 * layer_weights(columns),
    )
    tokens = columns.tokens
    in_flight = np.ones(len(columns)) if at_end else np.minimum(columns.micro_batches, columns.pipeline)
    if not at_end:
        in_flight = in_flight * np.where(
            columns.virtual > 1, 1 + (columns.pipeline - 1) / columns.pipeline / columns.virtual, 1
        )
    activations = in_flight * layers * _kept_bytes(columns) + (columns.recompute == _FULL) * _layer_bytes(columns)
    logits = np.where((columns.pipeline == 1) | at_end, _LOGIT_BYTES * tokens * columns.vocab / columns.tensor, 0.0)
    total: Column = state + activations + logits
    return total


def _kept_bytes(columns: WorkloadColumns) -> Column:
    """Bytes of activations that a layer keeps per micro-batch."""
    entry = 2 * columns.tokens * columns.hidden / np.where(columns.sequence_parallel > 0, columns.tensor, 1.0)
    whole = _layer_bytes(columns)
    # Results of products that are kept: the same share of a layer's bytes as of its products.
    repeated = columns.recomputed_layers * columns.recomputed_products
    full = repeated * entry + (1 - repeated) * whole
    return np.where(columns.recompute == _FULL, full, whole - (columns.recompute != _NONE) * _score_bytes(columns))


def _layer_bytes(columns: WorkloadColumns) -> Column:
    """Bytes of activations of a layer without recomputation."""
    tokens, hidden, t = columns.tokens, columns.hidden, columns.tensor
    shards = np.where(columns.sequence_parallel > 0, t, 1.0)
    plain = hidden * (10 / shards + 24 / t)
    keys = columns.kv_heads / columns.heads
    gated = 8 * hidden / shards + (2 * hidden * (1 + 2 * keys) + 2 * hidden + 8 * columns.intermediate) / t
    sums = 4 * columns.heads / t * (columns.attention != MATERIALIZED_SCORES)
    total: Column = tokens * (np.where(columns.gated > 0, gated, plain) + sums) + _score_bytes(columns)
    return total


def _score_bytes(columns: WorkloadColumns) -> Column:
    """Bytes of materialized attention: scores in 16 bits before and after softmax, and a dropout mask."""
    return np.where(
        columns.attention == MATERIALIZED_SCORES,
        5 * columns.heads * columns.sequence * columns.tokens / columns.tensor,
        0.0,
    )
