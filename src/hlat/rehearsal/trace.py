"""Order of a rank's work in a step: the messages that it issues, and the operations that it computes, with their FLOPs.

    operation --> message, matrix product, attention or other operations --> TraceEvent, in the order of issue
    operation, shapes --torch's formulas--> FLOPs; a multiply-add counts as two, attention counts all pairs of positions

FSDP2 names the module that it gathers or reduces by labels for profilers (``torch.profiler.record_function``), which
are operations too; so does hlat with every pass of a micro-batch. Consecutive pointwise operations of a module are one
event. The order is all that a rehearsal itself knows of time; ``timeline`` adds the rates of the cost model.

Recomputation in backward counts again, and so do the products of a chunked loss: these are the FLOPs that the program
executes, not those of the model (``hlat.model.counts.flops_per_token``).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hlat.model import ATTENTION_OPERATORS
from hlat.parallel import LabelledPass, parse_pass_label
from hlat.rehearsal.observers import message_kind
from hlat.runtime.progress import current_phase

_OWN_ATTENTION = tuple(operator.overloadpacket for operator in ATTENTION_OPERATORS)
_ATTENTION_FORWARD = (
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    *_OWN_ATTENTION,
)
_OWN_BACKWARD = (
    torch.ops.hlat.attend_within_documents_backward,
    torch.ops.hlat.attend_backward,
    torch.ops.hlat.attend_altered_backward,
)
_ATTENTION_BACKWARD = (
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    *_OWN_BACKWARD,
)
_WITH_WINDOW = (*_OWN_ATTENTION, *_OWN_BACKWARD)

# torch has no formulas for products that add to an operand in place; they have the FLOPs of those that return the sum.
_IN_PLACE = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}


def _attended_shapes(packet: Any, tensors: tuple[Any, ...], args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Shapes of (the gradient,) queries, keys and values, with as many keys as a query attends to with a window."""
    *queries, keys, values = (tuple(tensor.shape) for tensor in tensors)
    window = args[-1] if packet in _WITH_WINDOW else 0
    attended = min(keys[2], window or keys[2])
    # Keys and values get the heads of the queries that share them: torch's formula counts so, but demands it up to
    # 2.11.
    return [*queries, *((*queries[-1][:2], attended, shape[3]) for shape in (keys, values))]


def operation_flops(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """FLOPs of an operation by its arguments; 0 for one without products."""
    packet = _IN_PLACE.get(func._overloadpacket, func._overloadpacket)
    if packet in _ATTENTION_FORWARD:
        return int(sdpa_flop_count(*_attended_shapes(packet, args[:3], args)))
    if packet in _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*_attended_shapes(packet, args[:4], args)))
    return int(flop_registry[packet](*args, out_val=result)) if packet in flop_registry else 0


ENDS = "embedding, norm and head"
"""Name of the FSDP module with everything that no other one gathers."""

TO_ITSELF = "self"
"""Axis of a message of one rank to itself."""

PRODUCT, FP8_PRODUCT = "product", "fp8 product"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
OTHERS = "other kernels"
"""Kinds of events that are no messages; the last one is of operations without products: pointwise ones and copies."""

_LABEL = re.compile(r"FSDP::(\w+)(?: \((.+)\))?")
_MESSAGES = ("all_gather", "post_backward_reduce")  # labels around messages
_STARTS = ("pre_forward", "pre_backward")  # labels at the start of a module
_ADDED = ("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_")  # products whose first operand is added
_TO_ONE = ("send", "receive")
_PASSES = ("forward", "backward")  # phases in which passes run


@dataclass(frozen=True)
class TraceEvent:
    """A message, or operations of one module."""

    phase: str  # of the step
    kind: str  # of the message ("all_gather") or of the operation ("product")
    module: str  # FSDP module whose parameters or operations they are; empty for others
    axis: str = ""  # of a message; or several, as in "data+context"; empty for operations
    size: int = 0  # bytes of a message, or read and written by an operation without FLOPs
    flops: int = 0  # of a product or of attention
    shape: tuple[int, ...] = ()  # of a product: number in a batch, rows, columns, width that is summed over
    of_pass: LabelledPass | None = None  # of a micro-batch; None outside of passes
    recomputed: bool = False  # runs a second time, in backward

    @property
    def is_message(self) -> bool:
        return bool(self.axis)

    @property
    def is_between_stages(self) -> bool:
        """True for a message from one rank to another, which only pipelines have."""
        return self.kind in _TO_ONE


class Trace:
    """Collects the events of a step in ``events``; ``axis_of`` returns mesh axes from the arguments of a message.

    ``on_buffer`` gets every tensor sent or received, and the axis.
    """

    def __init__(
        self,
        axis_of: Callable[[Iterable[Any]], str],
        on_buffer: Callable[[torch.Tensor, str], None] = lambda tensor, axis: None,
    ) -> None:
        self.events: list[TraceEvent] = []
        self._axis_of, self._on_buffer = axis_of, on_buffer
        self._computed = self._exchanged = ""  # module whose operations, or whose message, are next
        self._pass: LabelledPass | None = None

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name
        if name == "profiler::_record_function_enter_new":
            self._read_label(str(args[0]))
        elif func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            size = max((tensor.nbytes for tensor in tensors), default=0)
            # A message of one rank to itself goes along no axis.
            axis = self._axis_of(args) or TO_ITSELF
            for tensor in tensors:
                self._on_buffer(tensor, axis)
            self.events.append(self._event(message_kind(func), self._exchanged, axis=axis, size=size))
            self._exchanged = ""
        elif not func.is_view:
            self._add_operation(name, func, args, result)

    def _read_label(self, label: str) -> None:
        self._pass = parse_pass_label(label) or self._pass
        found = _LABEL.fullmatch(label)
        if found is None:
            return
        module = found[2] or ENDS
        if found[1] in _MESSAGES:
            self._exchanged = module
        elif found[1] in _STARTS:
            self._computed = module
        elif found[1] == "post_forward":
            self._computed = ENDS

    def _event(self, kind: str, module: str, **values: Any) -> TraceEvent:
        phase = current_phase()
        return TraceEvent(phase, kind, module, of_pass=self._pass if phase in _PASSES else None, **values)

    def _add_operation(self, name: str, func: Any, args: tuple[Any, ...], result: Any) -> None:
        # Autograd runs backward with gradients disabled; recomputation enables them.
        again = current_phase() == "backward" and torch.is_grad_enabled()
        if flops := operation_flops(func, args, result):
            kind, shape = _product(name, args)
            self.events.append(self._event(kind, self._computed, flops=flops, shape=shape, recomputed=again))
        elif moved := _moved_bytes(name, args, result):
            event = self._event(OTHERS, self._computed, size=moved, recomputed=again)
            if self.events and replace(self.events[-1], size=moved) == event:
                event = replace(event, size=moved + self.events.pop().size)
            self.events.append(event)


def _product(name: str, args: tuple[Any, ...]) -> tuple[str, tuple[int, ...]]:
    """Kind of an operation with FLOPs, and the shape of a product."""
    if "atten" in name:
        return ATTENTION_BACKWARD if name.endswith("backward") else ATTENTION, ()
    left, right = args[1:3] if name in _ADDED else args[:2]
    count = left.shape[0] if left.dim() == 3 else 1
    kind = FP8_PRODUCT if name == "aten::_scaled_mm" else PRODUCT
    return kind, (count, left.shape[-2], right.shape[-1], left.shape[-1])


def _moved_bytes(name: str, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that an operation reads and writes; none for one that only reserves memory."""
    if "::empty" in name or "::new_empty" in name:
        return 0
    return sum(leaf.nbytes for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor))


def chrome_events(rank: int, events: Iterable[TraceEvent]) -> Iterator[dict[str, Any]]:
    """Events of a rank in the trace event format; a unit of time is a place in the order of issue."""
    for place, event in enumerate(events):
        yield {
            "ph": "X",
            "pid": rank,
            "tid": "messages" if event.is_message else "compute",
            "ts": place,
            "dur": 1,
            **described(event),
        }


def described(event: TraceEvent) -> dict[str, Any]:
    """Name, category and arguments of an event in the trace event format."""
    shape = "x".join(map(str, event.shape))
    found: dict[str, Any] = {"bytes": event.size} if event.size else {}
    found |= {"FLOPs": event.flops} if event.flops else {}
    found |= {"shape": shape} if shape else {}
    found |= {"axis": event.axis} if event.axis else {}
    if event.of_pass is not None:
        found |= {"stage": event.of_pass.stage, "micro-batch": event.of_pass.micro_batch}
    name = f"{event.kind} {event.module}".strip()
    return {"name": f"{name}, recomputed" if event.recomputed else name, "cat": event.phase, "args": found}
