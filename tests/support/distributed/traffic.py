"""Measurement of communication: layouts, and every message that a rank passes to torch.distributed.

    recipe of a row -> processes -> one step with every method of a process group wrapped -> Traffic

torch's own ``CommDebugMode`` counts collectives, but neither their bytes nor sends, and no dispatch mode can be on
while attention builds its ``CausalBias``. The size of a message is that of the complete tensor: the output of an
all-gather, the input of a reduce-scatter, the tensor of an all-reduce or send.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroup

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from tests.support.distributed.jobs import batch_of
from tests.support.distributed.layouts import Case, recipe_content

Traffic = Counter[tuple[str, int]]
"""How many messages of each (kind, bytes) a rank took part in."""

MICRO_BATCHES = 3

_KINDS = {  # by method name of a process group; torch 2.12 renamed three
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "receive",
}
_OTHERS = ("all", "broadcast", "gather", "reduce", "scatter", "recv", "barrier", "monitored_barrier")


@dataclass(frozen=True)
class Row:
    """A layout, with a model whose sizes all degrees divide; a step has three micro-batches of one sequence."""

    name: str
    world: int
    parallel: dict[str, Any]
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """Recipe as a mapping."""
        model_ranks = [self.parallel.get(axis, 1) for axis in ("tensor", "pipeline", "context")]
        data = self.world // (model_ranks[0] * model_ranks[1] * model_ranks[2])
        case = Case(self.name, self.world, self.parallel, micro_batch=1)
        return recipe_content(case, batch={"global_batch": MICRO_BATCHES * data}, memory=self.memory)

    @property
    def recipe(self) -> Recipe:
        """Validated recipe."""
        return parse_recipe(self.content, world=self.world)

    def __str__(self) -> str:
        return self.name


ROWS: tuple[Row, ...] = (
    Row("TP2 + SP", 2, {"tensor": 2}),
    Row("TP2 + SP, blocks computed twice", 2, {"tensor": 2}, {"activation_checkpointing": "full"}),
    Row("TP2", 2, {"tensor": 2, "sequence": False}),
    *(Row(f"DP2, ZeRO {zero}", 2, {"zero": zero}) for zero in range(4)),
    Row("DP2, ZeRO 3, blocks computed twice", 2, {"zero": 3}, {"activation_checkpointing": "full"}),
    *(Row(f"hybrid 2 x 2, ZeRO {zero}", 4, {"zero": zero, "replicas": 2}) for zero in (1, 3)),
    Row("PP2 1f1b", 2, {"pipeline": 2}),
    Row("PP2 1f1b x DP2, ZeRO 1", 4, {"pipeline": 2, "zero": 1}),
    Row("PP2 1f1b x TP2 + SP", 4, {"pipeline": 2, "tensor": 2}),
    Row("CP2, ZeRO 0", 2, {"context": 2, "zero": 0}),
    Row("CP2, ZeRO 1", 2, {"context": 2, "zero": 1}),
)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the messages of this process, also those of backward passes.

    Every method of a process group that sends or receives is wrapped; a method of no known kind is counted under its
    own name, so that no message is missed.
    """
    traffic: Traffic = Counter()

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(ProcessGroup, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            traffic[_KINDS.get(name, name), _size([*args, *kwargs.values()])] += 1
            return method(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        for name in dir(ProcessGroup):
            if name in _KINDS or name.startswith(_OTHERS):
                stack.enter_context(patch.object(ProcessGroup, name, counting(name)))
        yield traffic


def _size(values: Sequence[Any]) -> int:
    """Bytes of the largest tensor of an operation: of input and output of a gather or scatter, the complete tensor."""
    tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return max((tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)), default=0)


def count(runtime: Runtime, content: dict[str, Any]) -> Traffic:
    """Train two steps and count the messages of the second; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, matrices=model.matrices)
    update(model, optimizer, recipe, 1, accumulate_gradients(model, batch_of(model, recipe, 1)))
    with counted() as traffic:
        update(model, optimizer, recipe, 2, accumulate_gradients(model, batch_of(model, recipe, 2)))
    return traffic
