"""What is said about a run: once at its start, and at every logged step."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hlat.config.rules import recipe_notes
from hlat.model import attention_backend
from hlat.model.derived import count_parameters
from hlat.parallel import compilation
from hlat.precision import MODES
from hlat.runtime.backend import describe_device, peak_memory_bytes, synchronize
from hlat.runtime.distributed import AsyncMax
from hlat.runtime.process import enter_phase
from hlat.tracking import OtherRank, Tracker
from hlat.training.newest_saved import Damage
from hlat.training.process import Stopwatch, tell_notes
from hlat.training.run_state import Job
from hlat.training.step import StepResult


def announce(job: Job, tracker: Tracker | OtherRank) -> None:
    """Say what is about to be trained on what, and record it."""
    recipe, prepared = job.recipe, job.prepared
    parameters = count_parameters(recipe.model).total
    tracker.message(
        f"{recipe.run.name}: {parameters:,} parameters, {recipe.precision.mode} "
        f"on {describe_device(job.runtime.device)}, "
        f"peak {job.peak.value / 1e9:,.0f} GFLOP/s ({job.peak.source})"
    )
    compute = MODES[recipe.precision.mode].compute
    heads = (recipe.model.heads, recipe.model.n_kv_heads, recipe.model.n_head_dim)
    tracker.message(
        f"attention: {attention_backend(*heads, compute, job.runtime.device, recipe.data.isolate)}; "
        f"blocks: {compilation(recipe, job.runtime.device, job.runtime.world)}"
    )
    if job.precision is not None:
        tracker.message(job.precision)
    if recipe.precision.mode == "bf16":
        tracker.message(
            "precision.mode=bf16 rounds small updates away: training stalls as the learning rate falls. "
            "It is here for comparison; bf16-sr costs the same memory."
        )
    if job.runtime.world > 1:
        tracker.message(f"layout: {recipe.parallel.describe(job.model.layout.data)}")
    training = "" if recipe.data.mode == "online" else f"{prepared.train_tokens:,} training tokens, "
    tracker.message(
        f"data: {training}{prepared.validation_tokens:,} tokens for validation, "
        f"vocabulary {prepared.manifest.vocab_size:,}"
    )
    tracker.message(f"plan: {recipe.total_steps:,} steps of {recipe.tokens_per_step:,} tokens")
    for note in (*recipe_notes(recipe), *job.training_data.notes):
        tracker.message(note)
    for note in [*prepared.notes, *prepared.advice]:
        tracker.message(f"data: {note}")
    tell_damage(job.damaged, tracker)
    tell_notes(job.tiers.events, tracker)
    if job.tiers.warning:
        tracker.message(job.tiers.warning)
    if job.step > recipe.total_steps:
        tracker.message(f"at step {job.step} already, past the {recipe.total_steps} that the recipe asks for")
    elif job.step:
        tracker.message(f"resumed at step {job.step} of {recipe.total_steps}")
    for change in job.changes:
        tracker.message(f"changed since the checkpoint: {change.path}: {change.old!r} -> {change.new!r}")
    changes = [{"path": c.path, "old": c.old, "new": c.new} for c in job.changes]
    tracker.event("resume" if job.step else "start", step=job.step, parameters=parameters, changes=changes)


def tell_damage(damaged: Sequence[Damage], tracker: Tracker | OtherRank) -> None:
    """Record checkpoints that were set aside."""
    for damage in damaged:
        tracker.event("checkpoint_damaged", path=str(damage.path), problems=damage.problems)
        tracker.message(f"damaged checkpoint set aside: {damage.path}: {'; '.join(damage.problems)}")


def step_numbers(job: Job, result: StepResult) -> dict[str, Any]:
    """What the line of ``metrics.jsonl`` says of the step just done on any machine: numbers, and place in the data.

    Collective. Reading them waits for the device, so that the time of the steps is known then.
    """
    enter_phase("device")
    synchronize(job.runtime.device)
    enter_phase("between")
    return {
        "step": job.step,
        "tokens": job.tokens,
        "samples": job.samples,
        "batch_crc32": batch_crc32(job),
        "loss": float(result.loss),
        "grad_norm": float(result.gradient_norm),
        "param_norm": float(job.model.parameter_norm()),
        "lr": result.learning_rate,
    }


def step_times(job: Job, steps: int, watch: Stopwatch) -> dict[str, Any]:
    """The rest of that line, of the machine and the moment; ``steps`` have passed since the last line. Collective."""
    rate = steps * job.recipe.tokens_per_step / watch.training_seconds
    return {
        "tokens_per_second": rate,
        "mfu": job.utilization(rate, "causal"),
        "mfu_full": job.utilization(rate, "full"),
        "memory_bytes": _largest_memory(job),
        "seconds": watch.reset(),
    }


def batch_crc32(job: Job) -> int:
    """Of the token ids of the whole global batch of the step just done: the sum of those of its sequences.

    Collective: no rank has all of them.
    """
    here = 0
    if job.batch is not None and job.model.speaks:
        here = sum(zlib.crc32(row.tobytes()) for row in job.batch.inputs_BS.numpy())
    return int(job.runtime.ranks.all_reduce_sum(torch.tensor([here], dtype=torch.int64)).item()) & 0xFFFFFFFF


def _largest_memory(job: Job) -> int:
    """Peak memory in bytes of the rank that used most."""
    question = AsyncMax(job.runtime.ranks)
    question.start(peak_memory_bytes(job.runtime.device))
    return question.result()
