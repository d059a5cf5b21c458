"""What is said of numbers that went wrong, and when they end the run.

    verdict on a step --tell_verdict--> event and message, NumericsError where it is to stop
    weights           --check_numbers-> NumericsError where they are not finite

The run ends before it overwrites the last good checkpoint.
"""

import torch

from hlat.runtime import NumericsError
from hlat.tracking import OtherRank, Tracker
from hlat.training.run_state import Job
from hlat.training.step import StepResult
from hlat.training.step_metrics import batch_crc32

_DONE = {
    "warn": "nothing is done about it",
    "skip": "the update is not applied",
    "rollback": "back to the checkpoint before it, and on without these samples",
    "stop": "the run stops",
}


def tell_verdict(job: Job, result: StepResult, tracker: Tracker | OtherRank) -> None:
    """Record what was wrong with the step just done, if anything was. Collective.

    Raises:
        NumericsError: the verdict is to stop.
    """
    verdict = result.verdict
    if verdict.samples is None:
        return
    first, stop = verdict.samples
    tracker.event(
        "anomaly",
        step=job.step,
        kind=verdict.kind,
        action=verdict.action,
        samples=[first, stop],
        batch_crc32=batch_crc32(job),
        loss=float(result.loss),
        grad_norm=float(result.gradient_norm),
        window=dict(verdict.window),
        reason=verdict.reason,
    )
    where = f"step {job.step}, samples {first} to {stop - 1}"
    if verdict.action == "stop":
        raise _diverged(job, f"{where}: {verdict.reason}")
    tracker.message(f"{where}: {verdict.reason}: {_DONE[verdict.action]}")


def check_numbers(job: Job, result: StepResult) -> None:
    """See that the weights are finite, and the numbers of an update that was applied. Waits for the device, so it is
    asked where that happens anyway.

    Collective: every rank sees the same numbers and comes to the same verdict.

    Raises:
        NumericsError: one of them is infinite or not a number.
    """
    weights = job.model.parameter_norm()
    values = [weights, *((result.loss, result.gradient_norm) if result.verdict.applied else ())]
    if bool(torch.isfinite(torch.stack([value.to(weights) for value in values])).all()):
        return
    loss, gradient = float(result.loss), float(result.gradient_norm)
    raise _diverged(job, f"step {job.step}: loss {loss}, gradient norm {gradient}, parameter norm {float(weights)}")


def _diverged(job: Job, what: str) -> NumericsError:
    good = f"The last good state is {job.saved.path}." if job.saved is not None else "No checkpoint had been written."
    return NumericsError(
        f"{what}: training has diverged. "
        f"{good} A lower optimizer.lr, a longer schedule.warmup_steps or optimizer.clip_norm=1.0 would be tried next; "
        "the same command goes on from that checkpoint."
    )
