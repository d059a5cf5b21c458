"""Messages at the start of a run, and the metrics of a logged step."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hlat.config.rules import recipe_notes
from hlat.model import attention_backend
from hlat.model.derived import count_parameters
from hlat.parallel import decide_compilation
from hlat.precision import MODES
from hlat.runtime.backend import backend_of, peak_memory_bytes
from hlat.runtime.distributed import AsyncMax
from hlat.runtime.process import enter_phase
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.newest_saved import DamagedCheckpoint
from hlat.training.process import PhaseTimer, report_tier_notes
from hlat.training.run_state import RunState
from hlat.training.step import StepResult


def announce(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Log model, device, data and plan of the run, and record its start or resume as an event."""
    recipe, prepared = state.recipe, state.prepared
    parameters = count_parameters(recipe.model).total
    tracker.message(
        f"{recipe.run.name}: {parameters:,} parameters, {recipe.precision.mode} "
        f"on {backend_of(state.runtime.device).describe(state.runtime.device)}, "
        f"peak {state.peak.value / 1e9:,.0f} GFLOP/s ({state.peak.source})"
    )
    compute = MODES[recipe.precision.mode].compute
    heads = (recipe.model.heads, recipe.model.n_kv_heads, recipe.model.n_head_dim)
    by_document = recipe.data.isolate or recipe.model.window(recipe.data.sequence_length) is not None
    tracker.message(
        f"attention: {attention_backend(*heads, compute, state.runtime.device, by_document)}; "
        f"norms, RoPE, SwiGLU and loss: {state.kernels}; "
        f"blocks: {decide_compilation(recipe, state.runtime.device, state.runtime.world)}"
    )
    if state.precision_note is not None:
        tracker.message(state.precision_note)
    if recipe.precision.mode == "bf16":
        tracker.message(
            "precision.mode=bf16 rounds small updates away: training stalls as the learning rate falls. "
            "It is here for comparison; bf16-sr costs the same memory."
        )
    if recipe.precision.in_hardware:
        tracker.message(
            "precision.rounding=hardware: the device rounds every conversion to bf16 stochastically, with random "
            "numbers that no checkpoint has: a resumed run is not bitwise the one that was not interrupted"
        )
    if state.runtime.world > 1:
        tracker.message(f"layout: {recipe.parallel.describe(state.model.layout.data)}")
    training = "" if recipe.data.mode == "online" else f"{prepared.train_tokens:,} training tokens, "
    tracker.message(
        f"data: {training}{prepared.validation_tokens:,} validation tokens, vocabulary {prepared.manifest.vocab_size:,}"
    )
    tracker.message(f"plan: {recipe.steps_and_tokens}")
    for note in (*recipe_notes(recipe), *state.training_data.notes):
        tracker.message(note)
    for note in [*prepared.notes, *prepared.advice, *prepared.training_notes]:
        tracker.message(f"data: {note}")
    report_damaged(state.damaged, tracker)
    report_tier_notes(state.tiers.events, tracker)
    if state.tiers.warning:
        tracker.message(state.tiers.warning)
    if state.step > recipe.total_steps:
        tracker.message(f"at step {state.step} already, past the {recipe.total_steps} steps of the recipe")
    elif state.step:
        tracker.message(f"resumed at step {state.step} of {recipe.total_steps}")
    if state.saved_kernels not in (None, state.kernels):
        tracker.message(
            f"norms, RoPE, SwiGLU and loss are computed by {state.kernels}, before the checkpoint by "
            f"{state.saved_kernels}: they round differently, so the run will not be bitwise the one that was not "
            "interrupted"
        )
    for change in state.recipe_changes:
        tracker.message(f"changed since the checkpoint: {change.path}: {change.old!r} -> {change.new!r}")
    report_component_changes(state, tracker)
    recipe_changes = [{"path": c.path, "old": c.old, "new": c.new} for c in state.recipe_changes]
    tracker.event(
        "resume" if state.step else "start",
        step=state.step,
        parameters=parameters,
        processes=state.runtime.world,
        device=backend_of(state.runtime.device).describe(state.runtime.device),
        kernels=state.kernels,
        changes=recipe_changes,
        recipe=recipe.model_dump(mode="json"),  # reports need it before there is a checkpoint
    )


def report_component_changes(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Record components that begin without saved state, and saved state that is not continued."""
    for name in state.component_changes.begun:
        tracker.event("component_begun", step=state.step, name=name)
        tracker.message(f"{name}: the checkpoint has no state of it; it begins with the weights of step {state.step}")
    for name in state.component_changes.dropped:
        tracker.event("component_dropped", step=state.step, name=name)
        tracker.message(
            f"{name}: the checkpoint has its state, but the recipe does not ask for it: later checkpoints lack it"
        )


def report_damaged(damaged: Sequence[DamagedCheckpoint], tracker: Tracker | OtherRankTracker) -> None:
    """Record checkpoints that were found damaged and set aside."""
    for checkpoint in damaged:
        tracker.event("checkpoint_damaged", path=str(checkpoint.path), problems=checkpoint.problems)
        tracker.message(f"damaged checkpoint set aside: {checkpoint.path}: {'; '.join(checkpoint.problems)}")


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
        "memory_bytes": _max_memory(state),
        "seconds": timer.reset(),
    }


def batch_crc32(state: RunState) -> int:
    """Return the checksum of the last global batch: the sum of its sequences' CRC-32, modulo 2^32. Collective."""
    local = 0
    if state.last_batch is not None and state.model.is_model_parallel_leader:
        local = sum(zlib.crc32(row.tobytes()) for row in state.last_batch.inputs_BS.numpy())
    return int(state.runtime.ranks.all_reduce_sum(torch.tensor([local], dtype=torch.int64)).item()) & 0xFFFFFFFF


def _max_memory(state: RunState) -> int:
    """Return the peak memory of the rank that used most, in bytes. Collective."""
    maximum = AsyncMax(state.runtime.ranks)
    maximum.start(peak_memory_bytes(state.runtime.device))
    return maximum.result()
