"""A run whose numbers are no longer numbers stops before it overwrites the last good checkpoint with them."""

import torch

from hlat.config import NumericsError
from hlat.training.job import Job
from hlat.training.step import StepResult


def check_numbers(job: Job, result: StepResult) -> None:
    """See that loss, gradient and weights are finite. Waits for the device, so it is asked where that happens anyway.

    Collective: every rank sees the same numbers and comes to the same verdict.

    Raises:
        NumericsError: one of them is infinite or not a number.
    """
    values = torch.stack([result.loss, result.gradient_norm, job.model.parameter_norm().to(result.loss)])
    if bool(torch.isfinite(values).all()):
        return
    loss, gradient, weights = values.tolist()
    good = f"The last good state is {job.saved.path}." if job.saved is not None else "No checkpoint had been written."
    raise NumericsError(
        f"step {job.step}: loss {loss}, gradient norm {gradient}, parameter norm {weights}: training has diverged. "
        f"{good} A lower optimizer.lr, a longer schedule.warmup_steps or optimizer.clip_norm=1.0 would be tried next; "
        "the same command goes on from that checkpoint."
    )
