"""Measurement of state bytes: layouts, and the bytes of real storages on every rank.

    recipe of a row -> processes -> two steps, storages counted after every pass and around the optimizer's
        step -> StateBytes, to be compared with ``hlat.parallel.stages.stage_layers``

The sizes are chosen so that few divide evenly: a vocabulary of 307, a width of 30, and heads of 6
elements, whose norm weights leave the last of four shards empty.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

import hlat.parallel.parallel_model
from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import ParallelModel, build_parallel
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import StateBytes
from hlat.runtime.backend import torch_private
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from tests.support.distributed.jobs import batch_of
from tests.support.distributed.layouts import Case, recipe_content
from tests.support.distributed.stage_bytes import state_bytes

_ODD = {
    "layers": 4,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 6,
    "hidden_size": 30,
    "intermediate_size": 100,
    "vocab_size": 307,
    "qk_norm": True,
    "qkv_bias": True,
}
_TWO_KV_HEADS = _ODD | {"kv_heads": 2}
_FIVE_LAYERS = _ODD | {"layers": 5}
_TIED = _ODD | {"tie_embeddings": True}


def _case(name: str, world: int, parallel: dict[str, Any], model: dict[str, Any] = _ODD, micro_batch: int = 2) -> Case:
    return Case(name, world, parallel, dict(model), micro_batch)


ROWS: tuple[Case, ...] = (
    *(_case(f"DP2, ZeRO {zero}", 2, {"zero": zero}) for zero in range(4)),
    *(_case(f"DP4, ZeRO {zero}", 4, {"zero": zero}, micro_batch=1) for zero in range(4)),
    *(_case(f"DP2, ZeRO {zero}, one micro-batch", 2, {"zero": zero}, micro_batch=4) for zero in (1, 2)),
    _case("DP2, ZeRO 3, tied", 2, {"zero": 3}, _TIED),
    _case("hybrid 2 x 2, ZeRO 1", 4, {"zero": 1, "replicas": 2}, micro_batch=1),
    _case("hybrid 2 x 2, ZeRO 3", 4, {"zero": 3, "replicas": 2}, micro_batch=1),
    _case("TP2", 2, {"tensor": 2}, micro_batch=4),
    _case("TP4", 4, {"tensor": 4}, micro_batch=8),
    _case("TP4, 2 kv heads", 4, {"tensor": 4}, _TWO_KV_HEADS, micro_batch=8),
    _case("PP2, 1 + 4 layers", 2, {"pipeline": 2, "split": [1, 4]}, _FIVE_LAYERS),
    _case("PP2, tied", 2, {"pipeline": 2}, _TIED),
    _case("PP2 zbv, tied", 2, {"pipeline": 2, "schedule": "zbv"}, _TIED, micro_batch=1),
    _case("PP2 x DP2, ZeRO 1", 4, {"pipeline": 2, "zero": 1}),
    _case("PP2 x DP2, ZeRO 3", 4, {"pipeline": 2, "zero": 3}),
    _case(
        "PP2 interleaved-1f1b x DP2, ZeRO 3",
        4,
        {"pipeline": 2, "schedule": "interleaved-1f1b", "zero": 3},
        micro_batch=1,
    ),
    _case("PP2 zbv x DP2, ZeRO 1", 4, {"pipeline": 2, "schedule": "zbv", "zero": 1}, micro_batch=1),
    _case("CP2, ZeRO 1", 2, {"context": 2, "zero": 1}, micro_batch=4),
    _case("TP2 x PP2 x DP2, ZeRO 1", 8, {"tensor": 2, "pipeline": 2, "zero": 1}),
)

FOUR_STAGES = _case(
    "PP2 interleaved-1f1b, four stages a rank, x DP2, ZeRO 1",
    4,
    {"pipeline": 2, "schedule": "interleaved-1f1b", "virtual_stages": 4, "zero": 1},
    _ODD | {"layers": 8},
    micro_batch=2,
)
"""Gathered three at a time, and each reduced before the next has a gradient."""

_SEQUENCE_LENGTH = 16


def content_of(row: Case) -> dict[str, Any]:
    """Recipe of a row."""
    return recipe_content(row, data={"sequence_length": _SEQUENCE_LENGTH})


def expected(row: Case) -> list[StateBytes]:
    """Count the state bytes by formula, by rank."""
    recipe = parse_recipe(content_of(row), world=row.world)
    cut = StepShape.of(recipe, row.world)
    return [state_bytes(cut, rank) for rank in range(row.world)]


def measure(runtime: Runtime, content: dict[str, Any]) -> StateBytes:
    """Train two steps and measure the bytes during and after the second; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, matrices=model.matrices)
    update(model, optimizer, recipe, 1, accumulate_gradients(model, batch_of(model, recipe, 1)))
    assert not _messages(model), "FSDP2 keeps the buffer of a collective between steps"
    within = (0, 0)

    def look() -> None:
        nonlocal within
        within = (max(within[0], _bytes(_parameters(model))), max(within[1], _bytes(_gradients(model))))

    with _after_passes(model, look):
        loss = accumulate_gradients(model, batch_of(model, recipe, 2))
    gradients = _bytes(_gradients(model))
    update(model, optimizer, recipe, 2, loss)
    assert not _bytes(_gradients(model)), "gradients are freed by the update"
    state = (value for values in optimizer.state.values() for value in values.values())
    return StateBytes(_bytes(_parameters(model)), *within, gradients, _bytes(state))


@contextmanager
def _after_passes(model: ParallelModel, look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` after every forward and every backward pass of a micro-batch."""

    def then_look(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look()
            return result

        return wrapped

    with ExitStack() as stack:
        for part in model.stages:  # runs after FSDP2's own hook, which was registered first
            handle = part.register_forward_hook(lambda *_: look())
            stack.callback(handle.remove)
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            stack.enter_context(patch.object(PipelineStage, name, then_look(getattr(PipelineStage, name))))
        before = (
            hlat.parallel.parallel_model.configure_micro_batch
        )  # is called after the previous micro-batch's backward pass
        stack.enter_context(patch.object(hlat.parallel.parallel_model, "configure_micro_batch", then_look(before)))
        yield
        look()  # after the last micro-batch; in a pipeline, gradients are reduced by then


class _AtEveryOperation(TorchDispatchMode):
    """Dispatch mode that calls a function after every operation, also in backward passes."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look()
        return result


def measure_gathered(runtime: Runtime, content: dict[str, Any]) -> tuple[int, list[int]]:
    """Measure the maximum bytes of parameters during a step, and of each gathered unit; a job of the pool.

    Units are what FSDP2 gathers together, in order of execution.
    """
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    accumulate_gradients(model, batch_of(model, recipe, 1))
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, _bytes(_parameters(model)))

    with _AtEveryOperation(look):
        accumulate_gradients(model, batch_of(model, recipe, 2))
    return most, [
        sum(one.padded_sharded_param_size.numel() * runtime.world * 4 for one in group.fsdp_params)
        for group in _sharded_groups(model)
    ]


def _sharded_groups(model: ParallelModel) -> list[Any]:
    """Iterate over FSDP2's parameter groups: one per block; of each stage one or two for embedding, norm and head."""
    modules = [module for part in model.stages for module in part.modules() if isinstance(module, FSDPModule)]
    states = dict.fromkeys(module._get_fsdp_state() for module in modules)  # norm and head may share one
    return [group for state in states for group in torch_private.fsdp_parameter_groups(state)]


def _parameters(model: ParallelModel) -> Iterator[torch.Tensor]:
    yield from (one.parameter for one in model.local_parameters)
    yield from (parameter for part in model.stages for parameter in part.parameters())
    for group in _sharded_groups(model):
        for one in group.fsdp_params:
            yield one._sharded_param_data
            yield from one.all_gather_outputs


def _gradients(model: ParallelModel) -> Iterator[torch.Tensor | None]:
    yield from (one.parameter.grad for one in model.local_parameters)
    yield from (parameter.grad for part in model.stages for parameter in part.parameters())
    for group in _sharded_groups(model):
        yield group._partial_reduce_output
        for one in group.fsdp_params:
            yield one.unsharded_accumulated_grad
            if hasattr(one, "_unsharded_param"):
                yield one._unsharded_param.grad


def _messages(model: ParallelModel) -> list[Any]:
    """Iterate over the buffers that FSDP2 keeps of its collectives' inputs and outputs."""
    groups = _sharded_groups(model)
    kept = [one for group in groups for one in (group._all_gather_result, group.comm_ctx.all_gather_state)]
    for group in groups:  # torch 2.11 keeps one state, later ones a list
        context = group.comm_ctx
        kept += getattr(context, "reduce_scatter_states", None) or [getattr(context, "reduce_scatter_state", None)]
    return [one for one in kept if one is not None]


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of all storages of some tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            here = tensor.detach()
            storage = (here.to_local() if hasattr(here, "to_local") else here).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def table(measured: dict[str, list[StateBytes]]) -> str:
    """Format a Markdown table: a line per row and rank; ranks with equal numbers share a line."""
    lines = [
        "| layout | ranks | parameters | within a step | gradients, accumulating | at the step | optimizer state |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ranks in measured.items():
        for state in dict.fromkeys(ranks):
            which = [rank for rank, other in enumerate(ranks) if other == state]
            numbers = (
                state.parameters,
                state.parameters_within_step,
                state.gradients_accumulating,
                state.gradients,
                state.optimizer,
            )
            cells = " | ".join(f"{number:,}" for number in numbers)
            lines.append(f"| {name} | {', '.join(map(str, which))} | {cells} |")
    return "\n".join(lines)
