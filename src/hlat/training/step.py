"""One optimizer step.

    global batch -> micro-batches -> forward, summed loss / tokens of the global batch, backward
                 -> gradient norm -> clip -> learning rate -> AdamW

Because every micro-batch divides by the tokens of the whole batch, accumulation gives the gradient of the large
batch exactly, up to the order of additions, also where micro-batches have different numbers of labels.
"""

from dataclasses import dataclass

import torch

from hlat.config import Recipe
from hlat.data import IGNORED, Batch
from hlat.model import Decoder
from hlat.optim import clip_gradients, gradient_norm, learning_rate, set_learning_rate
from hlat.precision import autocast
from hlat.training.loss import summed_cross_entropy


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind: scalars stay on the device, so that nothing waits for the host."""

    batch: Batch
    loss: torch.Tensor  # mean over the tokens of the global batch, in nats
    gradient_norm: torch.Tensor  # before clipping
    learning_rate: float


def accumulate_gradients(model: Decoder, batch: Batch, recipe: Recipe, device: torch.device) -> torch.Tensor:
    """Add the gradient of the batch's mean loss to ``.grad``; returns that loss, a detached scalar."""
    tokens = int((batch.labels_BS != IGNORED).sum())
    size = recipe.batch.micro_batch
    loss = torch.zeros((), device=device)
    for inputs_BS, labels_BS in zip(batch.inputs_BS.split(size), batch.labels_BS.split(size), strict=True):
        with autocast(recipe.precision, device):
            logits_BSV = model(inputs_BS.to(device, non_blocking=True))
        part = summed_cross_entropy(logits_BSV, labels_BS.to(device, non_blocking=True)) / tokens
        del logits_BSV  # the graph keeps what backward needs
        part.backward()
        loss += part.detach()
    return loss


def update(model: Decoder, optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> tuple[torch.Tensor, float]:
    """Clip, set the rate of this step (counted from 1) and update; returns gradient norm and rate."""
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    if recipe.optimizer.clip_norm is not None:
        clip_gradients(parameters, norm, recipe.optimizer.clip_norm)
    rate = learning_rate(recipe.schedule, peak=recipe.optimizer.lr, horizon=recipe.horizon_steps, step=step)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, rate
