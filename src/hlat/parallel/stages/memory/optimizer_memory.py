"""Transient memory of a rank while the optimizer updates whole matrices.

    step shape, layers of a rank -> gradients, tensors of the exchange and of the update -> bytes

An optimizer that updates every element on its own needs no memory besides its state (``optim/adamw_bf16.py``).
"""

from functools import lru_cache

from hlat.model import ModelShard, block_share, parameter_layouts
from hlat.optim import optimizer_spec
from hlat.parallel.stages.matrix_plan import MatrixPlan, matrix_shapes
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
    matrices = 1 if model.tie_embeddings and all(ends) else sum(ends)
    at_ends = matrices * model.vocab_size * model.hidden_size / step.layout.tensor
    elements = layers * block_share(model, step.layout.tensor) + at_ends
    gathered = (at_ends if step.layout.zero == 3 else elements) * mode.compute.itemsize if step.sharded else 0.0
    working = max(0.0, _working(step, max(1, round(layers))) - gathered)
    return [{"gradients": elements / shards * mode.gradients.itemsize, "working": working}]


@lru_cache(maxsize=1024)
def _working(step: StepShape, layers: int) -> float:
    """Peak bytes of temporary tensors while a batch of hidden matrices, the first, is updated.

    Counted as if rows and columns divided evenly. ``MatrixExchange.transform`` has the tensors in this order.
    """
    spec, plan = optimizer_spec(step.optimizer, step.mode), MatrixPlan(step, 0, range(layers))
    assert spec.matrix_dtype is not None, "the caller checked this"
    item, layout, batch = spec.matrix_dtype.itemsize, step.layout, plan.batches[0]
    shards = step.shards if step.sharded else 1
    stored = {
        name: each.rows * each.columns[0] / shards
        for name, each in parameter_layouts(step.model, ModelShard(0, layout.tensor, range(1), False, False)).items()
        if each.is_hidden_matrix
    }
    owned = [(each.rows, each.columns) for each in plan.matrices(batch) if each.owner == 0]
    largest = max(stored.values())
    if len(plan.members) == 1:  # one parameter at a time, and a copy of one of its matrices
        shapes = [shape for _, _, shape in matrix_shapes(step.model, 0)]
        function = max(rows * columns * item + spec.matrix_bytes(rows, columns) for rows, columns in shapes)
        return largest * item + max(function, spec.element_bytes(round(largest)))
    local = len(batch) * sum(stored.values()) * item
    whole = sum(rows * columns for rows, columns in owned) * item
    function = max((spec.matrix_bytes(*shape) for shape in owned), default=0.0)
    copies = layout.replicas if step.sharded else layout.data * layout.context
    exchanged = (local / copies + whole, 2 * whole, whole + function, (1 + copies) * whole, copies * whole + local)
    return local + max(*exchanged, spec.element_bytes(round(largest)))
