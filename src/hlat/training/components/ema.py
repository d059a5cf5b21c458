"""Exponential moving average of the weights (``training.ema``).

    after a step:  average = decay * average + (1 - decay) * weights     in fp32, on the device of the weights
    checkpoint:    ema.<canonical name> --> hlat export --weights ema

Polyak and Juditsky 1992 average iterates; the exponential form with a constant decay is the one of Szegedy et al. 2016
(Inception v3, section 8) and of ``torch.optim.swa_utils.get_ema_multi_avg_fn``.
"""

from collections.abc import Sequence

import torch

from hlat.checkpoint import ExtraState
from hlat.config import Recipe
from hlat.model import LocalParameter
from hlat.runtime.process.phase import enter_phase
from hlat.training.components.base import StepEnd, TrainingComponent


class WeightAverage(TrainingComponent):
    """Average of the rows that this rank stores: as many fp32 elements, sharded as the weights are.

    Up to ``start_step`` the average equals the weights. From then on every multiple of ``every_steps`` updates it,
    unless the optimizer's update was skipped. In modes with fp32 master weights these are averaged, otherwise the bf16
    weights, converted to fp32. There is no communication and no wait for the device.

    Args:
        decay: weight of the old average in an update.
        every_steps: steps between two updates.
        start_step: step with whose weights the average begins.
        parameters: this rank's parameters.
    """

    def __init__(self, decay: float, every_steps: int, start_step: int, parameters: Sequence[LocalParameter]) -> None:
        self._decay, self._every, self._start, self._parameters = decay, every_steps, start_step, parameters
        self._averages = [
            torch.empty_like(each.tensor, dtype=torch.promote_types(each.tensor.dtype, torch.float32))
            for each in parameters
        ]

    def state(self) -> Sequence[ExtraState]:
        """Return the averages."""
        return [ExtraState("ema", self._averages)]

    @torch.no_grad()
    def reset(self) -> None:
        """Begin with the weights as they are."""
        for average, each in zip(self._averages, self._parameters, strict=True):
            average.copy_(each.tensor)

    def after_step(self, end: StepEnd) -> None:
        """Update the average, if this step does."""
        if not end.result.verdict.applied:
            return
        if end.step <= self._start:
            self._update(0.0)
        elif end.step % self._every == 0:
            self._update(self._decay)

    @torch.no_grad()
    def _update(self, decay: float) -> None:
        enter_phase("optimizer")
        for average, each in zip(self._averages, self._parameters, strict=True):
            average.lerp_(each.tensor.to(average.dtype), 1.0 - decay)
        enter_phase("between")


def weight_average(recipe: Recipe, parameters: Sequence[LocalParameter]) -> WeightAverage | None:
    """Build the average that ``training.ema`` asks for."""
    ema = recipe.training.ema
    return None if ema is None else WeightAverage(ema.decay, ema.every_steps, ema.start_step, parameters)
