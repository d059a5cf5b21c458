"""Layouts that are both rehearsed and run, and measurements of the run, independent of the rehearsal's code.

recipe of a row -> processes -> second step: after every operation the bytes of all live storages, and every call
    of a process group's methods; third step: torch's FLOP counter -> Step
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import hlat.parallel.parallel_model
from hlat.checkpoint import collect
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.data.samples.training_data import Batch
from hlat.optim import Optimizer, build_optimizer
from hlat.parallel import ParallelModel, build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from hlat.training.components import StepEnd
from hlat.training.optional_components import requested_components
from hlat.training.process import scheduled_gc
from tests.support.distributed.jobs import batch_of
from tests.support.distributed.layouts import NORMS_AFTER, TIED, TWO_KV_HEADS, WINDOW, Case, recipe_content
from tests.support.distributed.traffic import Traffic, counted

_LETTING_GO = 0.005  # seconds until a gloo thread has freed what it has sent or reduced
_ODD = {"layers": 4, "heads": 4, "kv_heads": 2, "qk_norm": True, "vocab_size": 307}


@dataclass(frozen=True)
class Row:
    """A layout, and the other settings that decide its memory."""

    case: Case
    memory: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"

    @property
    def content(self) -> dict[str, Any]:
        """Recipe as a mapping."""
        return recipe_content(
            self.case,
            memory=self.memory,
            precision={"mode": self.precision},
            data=self.data,
            training=self.training,
            optimizer={"kind": self.optimizer},
        )

    @property
    def recipe(self) -> Recipe:
        """Validated recipe."""
        return parse_recipe(self.content, world=self.case.world)

    def __str__(self) -> str:
        return f"{self.case.name}, {self.precision}"


def _row(name: str, world: int, parallel: dict[str, Any], **more: Any) -> Row:
    case = Case(name, world, parallel, dict(more.pop("model", _ODD)), more.pop("micro_batch", 2))
    return Row(case, **more)


_SELECTIVE, _FULL = ({"activation_checkpointing": name} for name in ("selective", "full"))

ROWS: tuple[Row, ...] = (
    _row("one process", 1, {}, precision="bf16-sr", memory=_SELECTIVE),
    _row("one process, documents apart", 1, {}, data={"isolate": True}),
    _row("one process, average", 1, {}, precision="bf16-sr", training={"ema": {}}),
    _row("DP2, ZeRO 3, average", 2, {"zero": 3}, precision="mixed", training={"ema": {"every_steps": 2}}),
    _row("DP2, ZeRO 0", 2, {"zero": 0}, precision="mixed"),
    _row("DP2, ZeRO 3, blocks computed twice", 2, {"zero": 3}, precision="mixed", memory=_FULL),
    _row("hybrid 2 x 2, ZeRO 1", 4, {"zero": 1, "replicas": 2}, micro_batch=1),
    _row("TP2 + SP", 2, {"tensor": 2}, memory=_SELECTIVE, micro_batch=8),
    _row("TP2 + SP, norms after", 2, {"tensor": 2}, model=NORMS_AFTER, memory=_FULL, micro_batch=4),
    _row("CP2, sliding window", 2, {"context": 2}, model=WINDOW, micro_batch=4),
    _row("TP4, 2 kv heads", 4, {"tensor": 4, "sequence": False}, model=TWO_KV_HEADS, precision="bf16-kahan"),
    _row("PP2 1f1b, tied", 2, {"pipeline": 2}, model=TIED),
    _row("PP2 interleaved-1f1b x DP2, ZeRO 3", 4, {"pipeline": 2, "schedule": "interleaved-1f1b", "zero": 3}),
    _row("PP2 zbv x DP2, ZeRO 1", 4, {"pipeline": 2, "schedule": "zbv"}, micro_batch=1, memory=_SELECTIVE),
    _row("CP2 x DP2, ZeRO 2", 4, {"context": 2, "zero": 2}, precision="mixed"),
    _row("TP2 x PP2 x DP2, ZeRO 1", 8, {"tensor": 2, "pipeline": 2}, precision="mixed", memory=_SELECTIVE),
    _row("Muon, one process", 1, {}, precision="bf16-kahan", memory=_FULL, optimizer="muon"),
    _row("Muon, DP2, ZeRO 0", 2, {"zero": 0}, optimizer="muon"),
    _row("Muon, TP2 x PP2 x DP2, ZeRO 1", 8, {"tensor": 2, "pipeline": 2}, precision="bf16-sr", optimizer="muon"),
    _row("Muon, TP4, 2 kv heads", 4, {"tensor": 4}, model=TWO_KV_HEADS, precision="mixed", optimizer="muon"),
    _row("Muon, hybrid 2 x 2, ZeRO 3", 4, {"zero": 3, "replicas": 2}, micro_batch=1, optimizer="muon"),
)


@dataclass(frozen=True)
class Step:
    """Memory, messages and FLOPs of a rank in a step, and the checkpoint blocks that it would save."""

    peak: int
    between: int
    traffic: Traffic
    checkpoint: tuple[int, int]  # blocks, bytes
    flops: int


class _Looking(TorchDispatchMode):
    """Dispatch mode that is called after every operation on plain tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.look(func, args, kwargs or {}, result)
        return result

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Handle the operation's result."""
        raise NotImplementedError


class _Storages(_Looking):
    """Bytes of all live storages created by operations, counted after each operation.

    A peak is counted twice: on a busy machine, a gloo thread may still keep the few bytes that it has reduced or sent
    when the main thread continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not isinstance(leaf, FakeTensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        now = self.now()
        if now > self.peak:
            time.sleep(_LETTING_GO)
            self.peak = max(self.peak, min(now, self.now()))

    def now(self) -> int:
        """Bytes alive at the moment."""
        self._seen = {key: reference for key, reference in self._seen.items() if not reference.expired()}
        storages = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._seen.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def measure(runtime: Runtime, content: dict[str, Any]) -> Step:
    """Train three steps and measure; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    with scheduled_gc(), _Storages() as storages:
        with _meshes_unseen():
            model = build_parallel(recipe, runtime, seed=None)
        for one in model.local_parameters:
            torch.nn.init.ones_(one.tensor)
        optimizer = build_optimizer(model.local_parameters, recipe.optimizer, recipe.precision.mode, 3, model.matrices)
        components = requested_components(recipe, model.local_parameters)
        components.reset()
        update(model, optimizer, recipe, 1, accumulate_gradients(model, _batch(model, recipe, 1)))
        batch = _batch(model, recipe, 2)
        storages.peak = 0
        whole = [one.view_as(one) for one in (batch.inputs_BS, batch.labels_BS)]  # counted, whoever needs it
        with counted() as traffic, _gloos_copies_unseen():
            result = update(model, optimizer, recipe, 2, accumulate_gradients(model, batch))
            components.after_step(StepEnd(2, result, is_last=False))
            del result
        del batch, whole
        peak, between = storages.peak, storages.now()
    flops = _flops(model, optimizer, recipe, 3)
    blocks = [
        one
        for one in collect(recipe.model, model.local_parameters, optimizer, components.state())
        if runtime.rank == 0 or not one.replicated
    ]
    return Step(peak, between, traffic, (len(blocks), sum(one.nbytes for one in blocks)), flops)


class _Flops(_Looking):
    """Sum the FLOPs of every operation by torch's own formulas.

    torch's FlopCounterMode hooks into backward passes, which zero-bubble schedules split.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        packet = func._overloadpacket
        if packet is torch.ops.aten.addmm_:  # torch has no formula for it
            self.total += 2 * args[0].numel() * args[1].shape[1]
        elif packet in _ATTENTION:
            self.total += _ATTENTION[packet](*args)
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **kwargs, out_val=result)


def _forward(query: Any, key: Any, value: Any, *_: Any) -> int:
    return int(sdpa_flop_count(query.shape, *_shared(query, key, value)))


def _shared(query: Any, *tensors: Any) -> list[tuple[int, ...]]:
    """Shapes of keys and values with the heads of the queries that share them, as torch 2.11 wants them."""
    return [(*query.shape[:2], *tensor.shape[2:]) for tensor in tensors]


def _windowed_forward(query: Any, key: Any, value: Any, first: Any, spans: Any, window: int) -> int:
    """With a sliding window every query attends to as many keys, at most."""
    return _forward(query, _last(key, window), _last(value, window))


def _windowed_backward(gradient: Any, query: Any, key: Any, value: Any, *more: Any) -> int:
    return _backward(gradient, query, _last(key, more[-1]), _last(value, more[-1]))


def _linear(x: Any, weight: Any, *_: Any) -> int:
    return int(2 * x.numel() * weight.shape[0])


def _last(key: Any, window: int) -> Any:
    return key[:, :, -window:] if window else key


def _backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, *_shared(query, key, value)))


# FLOPs of CPU attention and of oneDNN, which torch's counter does not support; hlat's own attention counts likewise.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    torch.ops.hlat.attend_within_documents: _windowed_forward,
    torch.ops.hlat.attend_within_documents_backward: _windowed_backward,
    torch.ops.hlat.attend: _windowed_forward,
    torch.ops.hlat.attend_backward: _windowed_backward,
    torch.ops.mkldnn._linear_pointwise: _linear,
}


def _flops(model: ParallelModel, optimizer: Optimizer, recipe: Recipe, step: int) -> int:
    with _Flops() as counted_flops:
        update(model, optimizer, recipe, step, accumulate_gradients(model, _batch(model, recipe, step)))
    return counted_flops.total


@contextmanager
def _meshes_unseen() -> Iterator[None]:
    """Exclude device meshes from the count: their tensors are on the host, and shards are on the meta device then."""
    with ExitStack() as stack:
        for name in ("create_process_groups", "shard_model"):
            function = getattr(hlat.parallel.parallel_model, name)
            stack.enter_context(patch.object(hlat.parallel.parallel_model, name, _unseen(function)))
        yield


def _gloos_copies_unseen() -> Any:
    """Exclude the copy of its input by which gloo reduces and scatters: internal to the library, and not in NCCL.

    gloo sums the copy over all ranks. When it is waited for, it takes the rank's part by ``split``, a visible operation
    whose result has the storage of the copy.
    """
    return patch.object(Work, "wait", _unseen(Work.wait))


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    def unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return unseen


def _batch(model: ParallelModel, recipe: Recipe, step: int) -> Batch:
    """Tokens that are not counted as created by an operation, like those of a data loader."""
    with _disable_current_modes():
        batch = batch_of(model, recipe, step)
        return replace(batch, inputs_BS=batch.inputs_BS.contiguous(), labels_BS=batch.labels_BS.clone())
