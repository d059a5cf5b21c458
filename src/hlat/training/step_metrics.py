"""Metrics of a logged step: those that any machine computes alike, and those of time and memory."""

import zlib
from typing import Any

import torch

from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.async_max import AsyncMax
from hlat.runtime.process.phase import enter_phase
from hlat.training.process.phase_timer import PhaseTimer
from hlat.training.run_state import RunState
from hlat.training.step import StepResult


def reproducible_metrics(state: RunState, result: StepResult) -> dict[str, Any]:
    """Return the metrics of the step just done that are the same on any machine: values and position in the data.

    Collective. Waits for the device once: the norm of the weights is that after the update, so that the times read
    afterwards are those of finished steps.
    """
    norm = state.model.parameter_norm()
    enter_phase("device")
    loss, gradient_norm, parameter_norm = torch.stack((result.loss, result.gradient_norm, norm)).tolist()
    enter_phase("between")
    return {
        "step": state.step,
        "tokens": state.tokens,
        "samples": state.samples,
        "batch_crc32": batch_crc32(state),
        "loss": loss,
        "grad_norm": gradient_norm,
        "param_norm": parameter_norm,
        "lr": result.learning_rate,
    }


def timing_metrics(state: RunState, tokens: int, timer: PhaseTimer) -> dict[str, Any]:
    """Return the metrics that depend on machine and time: throughput, MFU, memory, seconds per phase. Collective.

    Args:
        state: the run.
        tokens: tokens of the steps since the last line.
        timer: seconds per phase since the last line; it is reset.
    """
    rate = tokens / timer.training_seconds
    return {
        "tokens_per_second": rate,
        "mfu": state.utilization(rate, "causal"),
        "mfu_full": state.utilization(rate, "full"),
        **_memory(state),
        "seconds": timer.reset(),
    }


def batch_crc32(state: RunState) -> int:
    """Return the checksum of the last global batch: the sum of its sequences' CRC-32, modulo 2^32. Collective."""
    local = 0
    if state.last_batch is not None and state.model.is_model_parallel_leader:
        local = sum(zlib.crc32(row.tobytes()) for row in state.last_batch.inputs_BS.numpy())
    return int(state.runtime.ranks.all_reduce_sum(torch.tensor([local], dtype=torch.int64)).item()) & 0xFFFFFFFF


def _memory(state: RunState) -> dict[str, int]:
    """Return the peak memory of the rank that used most, and what its allocator had to reserve. Collective."""
    device, ranks = state.runtime.device, state.runtime.ranks
    backend = backend_of(device)
    found, use = {"memory_bytes": backend.peak_memory_bytes(device)}, backend.allocator_use(device)
    if use is not None:
        found |= {"memory_reserved_bytes": use.reserved, "memory_retries": use.retries}
    maximum = AsyncMax(ranks)

    def most(value: int) -> int:
        maximum.start(value)
        return maximum.result()

    return {name: most(value) for name, value in found.items()}
