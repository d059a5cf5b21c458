"""One optimizer step, and the timer of its phases.

    this rank's sequences -> micro-batches -> forward, summed loss / tokens of the global batch, backward
                          -> loss and gradient norm over all ranks -> verdict -> clip -> learning rate -> optimizer
    phases of the steps --PhaseTimer--> seconds of each phase between two log lines

Every micro-batch of every rank divides its loss by the tokens of the global batch. So gradient accumulation and data
parallelism give exactly the gradient of the global batch, up to the order of additions, even if micro-batches have
different numbers of labels.

The verdict is computed on the host, which reads loss and norm: one device synchronization in each step. A rejected
update is not applied at all; it is never multiplied by zero, because zero times NaN is NaN.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.config import Recipe
from hlat.data import Batch
from hlat.optim import Optimizer, learning_rate
from hlat.parallel import ParallelModel
from hlat.resilience import APPLY, StepVerdict
from hlat.runtime.progress import enter_phase

StepCheck = Callable[[float, float], StepVerdict]
"""Function from loss and gradient norm of a step to its verdict; it returns the same on every rank."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank. Scalar tensors stay on the device, to avoid synchronization."""

    loss: torch.Tensor  # mean over the tokens of the global batch, in nats
    gradient_norm: torch.Tensor  # before clipping
    learning_rate: float
    verdict: StepVerdict = APPLY


def accumulate_gradients(model: ParallelModel, batch: Batch) -> torch.Tensor:
    """Add the gradient of the global batch's mean loss to ``.grad``; return this rank's term of the loss."""
    return model.accumulate_gradients(batch.inputs_BS, batch.labels_BS, batch.positions_BS)


def update(
    model: ParallelModel,
    optimizer: Optimizer,
    recipe: Recipe,
    step: int,
    loss: torch.Tensor,
    check: StepCheck | None = None,
) -> StepResult:
    """Reduce loss and gradients over all ranks, and update the weights if the verdict applies the update. Collective.

    ``step`` counts from 1, ``loss`` is the result of ``accumulate_gradients``. Without ``check``, the update is always
    applied, and the device is not waited for.
    """
    enter_phase("reduce")
    loss, norm = model.reduce_loss_and_norm(loss)
    verdict = APPLY
    if check is not None:
        enter_phase("device")
        verdict = check(*torch.stack((loss, norm)).tolist())
    enter_phase("optimizer")
    rate = learning_rate(recipe.schedule, peak=recipe.optimizer.lr, horizon=recipe.horizon_steps, step=step)
    if verdict.applied:
        if recipe.optimizer.clip_norm is not None:
            optimizer.clip_gradients(norm, recipe.optimizer.clip_norm)
        optimizer.set_learning_rate(rate)
        optimizer.step()
    # None instead of zeros: frees the memory, and backward writes gradients without reading them.
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm, rate, verdict)


TRAINING_PHASES = ("data", "forward", "backward", "reduce", "optimizer", "device")


class PhaseTimer:
    """Seconds per named phase since the last ``reset``; a phase lasts until the next one begins."""

    def __init__(self, first: str = "between", clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = first, clock()

    def __call__(self, phase: str) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @property
    def training_seconds(self) -> float:
        """Seconds spent in training steps, without evaluation and checkpoints, up to the last change of phase."""
        return sum(self._seconds.get(name, 0.0) for name in TRAINING_PHASES)

    def reset(self) -> dict[str, float]:
        """Return the seconds per phase, and start again from zero."""
        self(self._phase)
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
