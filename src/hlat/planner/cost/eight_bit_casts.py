"""Casts to 8 bits: what the operands of a block's fp8 products cost before they are multiplied.

    columns, constants -> bytes read and written -> seconds of a layer, forward and backward

A product in fp8 has operands of 8 bits, and the gradient of its weight needs input and gradient transposed. Transformer
Engine casts and transposes in one kernel, or in the norm in front; others have passes over 16-bit tensors of their own.
"""

import numpy as np

from hlat.planner.cost.constants import Constants
from hlat.planner.problem import Column, WorkloadColumns, block_products

_CAST = 2 + 1 + 1  # bytes per element: read in 16 bits, written as is and transposed
_TRANSPOSITION = 1 + 1


def cast_times(columns: WorkloadColumns, constants: Constants) -> tuple[Column, Column]:
    """Seconds of a layer's casts, forward and backward; 0 without 8-bit products."""
    rate = columns.memory_rate * constants.column("memory", columns)
    inputs = sum(columns.tokens * width for _, width in block_products(columns))
    separate = 3 * inputs / rate * constants.column("casts", columns)
    forward, backward = _engine_bytes(columns)
    engine = columns.transformer_engine > 0
    return (
        np.where(columns.eight_bit > 0, np.where(engine, forward / rate, separate), 0.0),
        np.where(columns.eight_bit > 0, np.where(engine, backward / rate, 2 * separate), 0.0),
    )


def _engine_bytes(columns: WorkloadColumns) -> tuple[Column, Column]:
    """Memory traffic of Transformer Engine's casts of one layer, forward and backward.

    Forward, norms write fp8 themselves: only the transposition of their results is left. Inputs of the output and of
    the down projection are cast. Backward, so are the gradients of all results; with sequence parallelism those of the
    two residual sums in shards, which are gathered in fp8 and then transposed. Weights are cast once per step.
    Source: transformer_engine/pytorch/module, layernorm_linear.py, linear.py, and grad_output_preprocess in base.py.
    """
    qkv, output, gate_and_up, down = block_products(columns)
    forward = 2 * _TRANSPOSITION * columns.hidden + _CAST * (output[1] + down[1])
    in_shards = (_CAST - 1) / columns.tensor + _TRANSPOSITION
    of_sums = np.where(columns.sequence_parallel > 0, in_shards, _CAST)
    backward = 2 * of_sums * columns.hidden + _CAST * (qkv[0] + gate_and_up[0])
    return columns.tokens * forward, columns.tokens * backward
