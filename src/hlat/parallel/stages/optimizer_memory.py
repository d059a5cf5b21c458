"""Transient memory of a rank while the optimizer updates whole matrices.

    step shape, layers of a rank -> gradients, tensors of the exchange and of the update -> bytes

An optimizer that updates every element on its own needs no memory besides its state (``optim/adamw_bf16.py``).
"""

from functools import lru_cache

from hlat.model.derived import block_share
from hlat.optim import optimizer_spec
from hlat.parallel.stages.matrix_plan import MatrixPlan
from hlat.parallel.stages.step_shape import StepShape
from hlat.precision import MODES


def optimizer_instant(step: StepShape, layers: float, ends: tuple[bool, bool]) -> list[dict[str, float]]:
    """Compute the transient bytes by name while the optimizer updates a batch of matrices; none if it has no such.

    Parameters gathered by FSDP2 are freed by then, but counted by the callers: their bytes are subtracted here.

    Args:
        step: model, layout and optimizer of a training step.
        layers: layers of the rank.
        ends: (True if it has the embedding, True if it has the head).
    """
    if optimizer_spec(step.optimizer, step.mode).matrix_dtype is None:
        return []
    model, mode, shards = step.model, MODES[step.mode], step.shards if step.sharded else 1
    at_ends = sum(ends) * model.vocab_size * model.hidden_size / step.layout.tensor
    elements = layers * block_share(model, step.layout.tensor) + at_ends
    gathered = (at_ends if step.layout.zero == 3 else elements) * mode.compute.itemsize if step.sharded else 0.0
    working = max(0.0, _working(step, max(1, round(layers))) - gathered)
    return [{"gradients": elements / shards * mode.gradients.itemsize, "working": working}]


@lru_cache(maxsize=1024)
def _working(step: StepShape, layers: int) -> float:
    """Peak bytes of temporary tensors of the update of hidden matrices."""
    plan = MatrixPlan(step, 0, range(layers))
    return plan.working_bytes
