"""One optimizer step.

    this rank's sequences -> micro-batches -> forward, summed loss / tokens of the global batch, backward
                          -> loss and gradient norm over all ranks -> verdict -> clip -> learning rate -> AdamW

Because every micro-batch of every rank divides by the tokens of the whole batch, accumulation and data parallelism give
the gradient of the large batch exactly, up to the order of additions, also where they have different numbers of labels.

The verdict is the host's, which has to read loss and norm for it: one wait for the device in each step. An update that
is refused is left out altogether, never multiplied by zero: zero times NaN is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.config import Recipe
from hlat.data.samples import Batch
from hlat.optim import learning_rate, set_learning_rate
from hlat.parallel import ParallelModel
from hlat.resilience import APPLY, Verdict
from hlat.runtime.process import enter_phase

Judge = Callable[[float, float], Verdict]
"""Loss and gradient norm of a step -> what is done about it; the same on every rank."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, the same on every rank; scalars stay on the device, so that nothing waits for it."""

    loss: torch.Tensor  # mean over the tokens of the global batch, in nats
    gradient_norm: torch.Tensor  # before clipping
    learning_rate: float
    verdict: Verdict = APPLY  # on loss and norm


def accumulate_gradients(model: ParallelModel, batch: Batch) -> torch.Tensor:
    """Leave the gradient of the global batch's mean loss in ``.grad``; returns this rank's term of the loss.

    Args:
        model: this rank's share.
        batch: the sequences ``model.rows`` of the global batch.
    """
    return model.accumulate_gradients(batch.inputs_BS, batch.labels_BS, batch.positions_BS)


def update(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    loss: torch.Tensor,
    judge: Judge | None = None,
) -> StepResult:
    """Clip, set the rate of this step (counted from 1) and update, unless the verdict is against it.

    Args:
        loss: what ``accumulate_gradients`` returned.
        judge: decides whether the update is applied; None always applies it, and does not wait for the device.
    """
    enter_phase("reduce")
    loss, norm = model.reduce_loss_and_norm(loss)
    verdict = APPLY
    if judge is not None:
        enter_phase("device")
        verdict = judge(*torch.stack((loss, norm)).tolist())
    enter_phase("optimizer")
    rate = learning_rate(recipe.schedule, peak=recipe.optimizer.lr, horizon=recipe.horizon_steps, step=step)
    if verdict.applied:
        if recipe.optimizer.clip_norm is not None:
            model.clip_gradients(norm, recipe.optimizer.clip_norm)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm, rate, verdict)
