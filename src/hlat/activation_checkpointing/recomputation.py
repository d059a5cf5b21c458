"""Apply activation checkpointing to a model: save fewer activations, recompute them in backward (Chen et al. 2016).

    none       everything that backward needs is saved
    selective  core attention and the SwiGLU product are recomputed (HLAT; Korthikanti et al. 2022, section 5)
    full       only the input of each block is saved
    budget     the cheapest choice of tensors, block by block, that fits into a memory budget (``plan.py``)

In eager mode a block's forward pass is a chain of steps, of which the chosen ones run again in backward:

    x -> attention_input -> qkv -> attention_output -> residual -> feed_forward_input -> gate_up -> inner -> down
           norm, gather    product   core attention   product, +      norm, gather        product   SwiGLU   product, +

When autograd saves a result of a recomputed step, or a tensor that the step saves for its own backward (norm scales,
attention's log-sum-exp, cast copies of weights), a placeholder is stored instead. The first placeholder that backward
unpacks runs the step again, from saved tensors or from earlier recomputed steps. All its results stay until the last
placeholder of the step is unpacked, so that a step runs only once in a backward pass. Other saved tensors are
unchanged.

Why hooks on saved tensors (``torch.autograd.graph.saved_tensors_hooks``) and not torch's selective checkpointing? That
dispatches every operation of a block through Python, twice, forbids in-place operations, and selects by operation, not
by its role in the block. Here only saved tensors cost time, and steps are functions of the block. (If compiled, the
overhead occurs once: ``compiled.py``.) Why not ``torch.utils.checkpoint``? It supports a single backward pass over a
block. Schedules that split the backward pass unpack tensors twice and in another order, and it would recompute the
block for each of its parameters.

A recomputed step calls the same functions with the same shapes, strides and flags, hence the same kernels: the bits are
the same as in forward. Collectives inside a step (the all-gathers of sequence and context parallelism, the reduction
after the output projection) run again with it, on every rank in the same order.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hlat.activation_checkpointing.compiled import contexts
from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.model import Decoder, DecoderBlock, DocumentMask, LayerCache

RopeTables = tuple[torch.Tensor, torch.Tensor]


class _StopEarly(Exception):
    """Stops a recomputed step when all required tensors exist."""


def _storage(tensor: torch.Tensor) -> int:
    # Not the address of the data: fake tensors of a rehearsal have none.
    return int(tensor.untyped_storage()._cdata)


class _Step:
    """A recomputed step of one forward pass.

    Each input is a source (a tensor, or a step and the index of its result), and True if it requires a gradient.
    ``results`` is False if only the tensors saved for the step's own backward are recomputed.
    """

    def __init__(
        self,
        passes: "_Passes",
        function: Callable[..., Any],
        inputs: Sequence[tuple[Any, bool]],
        results: bool,
    ) -> None:
        self._passes, self._function, self._inputs, self.results = passes, function, inputs, results
        self.internals = 0  # number of tensors saved for its own backward
        self.placeholders = 0  # number of saved tensors replaced by a placeholder
        self._pending = 0  # placeholders not unpacked since the step ran again
        self._runs = 0
        self._recomputed: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def take(self, internal: bool, index: int) -> torch.Tensor:
        tensor = self._recompute()[internal][index]
        self._pending -= 1
        if self._pending <= 0 and not self._passes.several:
            self._recomputed = None
        return tensor

    def free(self) -> None:
        self._recomputed = None

    def _recompute(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        # All results stay until the last placeholder is unpacked, so that a step runs once in a backward pass.
        if self._recomputed is not None:
            return self._recomputed
        self._passes.begin(second=self._runs > 0)
        recomputed = self._run()
        self._runs += 1
        self._pending = self.placeholders
        if self.placeholders:
            self._recomputed = recomputed
        return recomputed

    def _run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        arguments = self._arguments()
        known = {_storage(argument) for argument in arguments} | self._passes.parameters()
        internals: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            if _storage(tensor) not in known:
                internals.append(tensor.detach())
                if not self.results and len(internals) == self.internals:
                    raise _StopEarly

        outputs: Any = ()
        # Gradients are enabled, though never computed, since the choice of kernels depends on it.
        with torch.enable_grad(), saved_tensors_hooks(collect, _never_unpack), suppress(_StopEarly):
            outputs = self._function(*arguments)
        if len(internals) != self.internals:
            message = f"a step saved {self.internals} tensors in forward, but {len(internals)} when recomputed"
            raise RuntimeError(message)
        return [output.detach() for output in _as_tuple(outputs)], internals

    def _arguments(self) -> list[torch.Tensor]:
        by_step: dict[_Step, list[torch.Tensor]] = {}
        arguments = []
        for source, differentiable in self._inputs:
            if isinstance(source, torch.Tensor):
                tensor = source
            else:
                step, index = source
                if step not in by_step:
                    by_step[step] = step._recompute()[0]
                tensor = by_step[step][index]
            arguments.append(tensor.detach().requires_grad_(differentiable))
        return arguments


def _as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _never_unpack(_: Any) -> torch.Tensor:
    raise AssertionError("the graph of a recomputed step is not differentiated")


class _Placeholder:
    """Stands for a saved tensor: a view of a result of a step, or of a tensor saved for the step's own backward."""

    def __init__(self, step: _Step, internal: bool, index: int, tensor: torch.Tensor) -> None:
        self._step, self._internal, self._index = step, internal, index
        self._geometry = (tensor.shape, tensor.stride(), tensor.storage_offset())
        step.placeholders += 1

    def tensor(self) -> torch.Tensor:
        return self._step.take(self._internal, self._index).as_strided(*self._geometry)


def _unpack(saved: "torch.Tensor | _Placeholder") -> torch.Tensor:
    return saved.tensor() if isinstance(saved, _Placeholder) else saved


class LastRecomputed:
    """Reference to the block that recomputed last, shared by the blocks of a model."""

    def __init__(self) -> None:
        self.passes: ref[_Passes] | None = None


class _Passes:
    """State of the backward passes over one forward pass of a block, shared by its steps."""

    def __init__(self, block: DecoderBlock, last: LastRecomputed) -> None:
        self._block, self._last = block, last
        # Weak: saved tensors keep the steps alive, and end them with the graph.
        self.steps: list[ref[_Step]] = []
        # A split backward pass returns for the weight gradients, in another order: then recomputed tensors stay until
        # another block recomputes. In a single pass they are freed when all placeholders are unpacked.
        self.several = False

    def parameters(self) -> set[int]:
        # Computed anew each time: the storages of sharded parameters change.
        return {_storage(parameter) for parameter in self._block.parameters()}

    def begin(self, second: bool) -> None:
        """Record that a step is about to run again; ``second`` if not for the first time."""
        self.several = self.several or second
        previous = self._last.passes() if self._last.passes is not None else None
        if previous is not self:
            if previous is not None and previous.several:
                previous.free()
            self._last.passes = ref(self)

    def free(self) -> None:
        for reference in self.steps:
            step = reference()
            if step is not None:
                step.free()


class _Forward:
    """One forward pass of a block: runs its steps, and stores placeholders for saved tensors of recomputed steps."""

    def __init__(self, block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed) -> None:
        self._recomputed = recomputed
        self._passes = _Passes(block, last)
        self._parameters = self._passes.parameters()
        self._results: dict[int, tuple[_Step, int]] = {}  # by storage; these tensors are all alive
        self._inside: _Step | None = None
        self._entered: set[int] = set()

    def step(self, name: str, function: Callable[..., Any], *inputs: torch.Tensor, own: str = "") -> Any:
        """Run a step; register it for recomputation if ``name`` (results) or ``own`` (saved tensors) is recomputed."""
        results = name in self._recomputed
        if not results and own not in self._recomputed:
            return function(*inputs)
        sources = [(self._source(tensor), tensor.requires_grad) for tensor in inputs]
        step = self._inside = _Step(self._passes, function, sources, results)
        self._entered = {_storage(tensor) for tensor in inputs}
        try:
            outputs = function(*inputs)
        finally:
            self._inside = None
        self._passes.steps.append(ref(step))
        if results:
            for index, output in enumerate(_as_tuple(outputs)):
                self._results[_storage(output)] = (step, index)
        return outputs

    def _source(self, tensor: torch.Tensor) -> Any:
        return self._results.get(_storage(tensor), tensor.detach())

    def pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Placeholder":
        # Autograd stores a placeholder in place of what a recomputed step makes, and any other tensor itself.
        storage = _storage(tensor)
        if storage in self._results:
            step, index = self._results[storage]
            return _Placeholder(step, False, index, tensor)
        inside = self._inside
        if inside is None or storage in self._entered or storage in self._parameters:
            return tensor
        inside.internals += 1
        return _Placeholder(inside, True, inside.internals - 1, tensor)

    def forget_all_but(self, *tensors: torch.Tensor) -> None:
        # Tensors that are freed may give their identities to others.
        storages = {_storage(tensor) for tensor in tensors}
        self._results = {key: result for key, result in self._results.items() if key in storages}


class RecomputingForward:
    """A block's forward pass with recomputation, to replace ``block.forward``.

    All hooks of the block's modules are called, except for forward hooks of ``attention`` and ``feed_forward``
    themselves, which are not supported.
    """

    def __init__(self, block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed) -> None:
        assert not block.attention._forward_hooks and not block.feed_forward._forward_hooks, "these hooks would not run"
        self._block, self.recomputed, self._last = block, recomputed, last
        # If the forward method is compiled, use the original: the wrapper is compiled with recomputation inside.
        self._plain = getattr(block.forward, "_torchdynamo_orig_callable", block.forward)
        self._contexts = contexts(recomputed, block.attention.coalesce, bool(block.attention.output._forward_hooks))

    def __call__(
        self,
        x_BSD: torch.Tensor,
        tables: RopeTables | None,
        cache: LayerCache | None = None,
        document_mask: DocumentMask | None = None,
    ) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        if not torch.is_grad_enabled():
            return self._plain(x_BSD, tables, cache, document_mask)
        assert cache is None, "generation needs no gradients"
        if torch.compiler.is_compiling():
            out: torch.Tensor = checkpoint(
                lambda x, tables: self._plain(x, tables, None, document_mask),  # arguments have to be tensors
                x_BSD,
                tables,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=self._contexts,
            )
            return out
        forward = _Forward(self._block, self.recomputed, self._last)
        with saved_tensors_hooks(forward.pack, _unpack):
            residual_BSD = _attention(self._block, forward, x_BSD, tables, document_mask)
            forward.forget_all_but(residual_BSD)
            out_BSD = _feed_forward(self._block, forward, residual_BSD)
        # Autograd keeps the hooks, and so this object, with every saved tensor of the block. Its steps hold tensors.
        forward.forget_all_but()
        return out_BSD


def _attention(
    block: DecoderBlock,
    run: _Forward,
    x_BSD: torch.Tensor,
    tables: RopeTables | None,
    document_mask: DocumentMask | None,
) -> torch.Tensor:
    attention = block.attention
    normed = run.step("attention_input", lambda x: _run_pre_hooks(attention, block.before_attention(x)), x_BSD)
    q, k, v = run.step("qkv", lambda x: attention.project(x, tables), normed)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.attend(q, k, v, None, document_mask)

    heads = run.step("attention_output", attend, q, k, v, own="attention_log_sum")

    def leave(x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return block.after_attention(x, attention.output(heads))

    out: torch.Tensor = run.step("residual", leave, x_BSD, heads)
    return out


def _feed_forward(block: DecoderBlock, run: _Forward, residual_BSD: torch.Tensor) -> torch.Tensor:
    layer = block.feed_forward

    def enter(x: torch.Tensor) -> torch.Tensor:
        return _run_pre_hooks(layer, block.before_feed_forward(x))

    normed = run.step("feed_forward_input", enter, residual_BSD)
    gate_up = run.step("gate_up", layer.project, normed)
    inner = run.step("inner", layer.activate, *gate_up)
    return block.after_feed_forward(residual_BSD, run.step("", layer.down, inner, own="down_weight_copy"))


def _run_pre_hooks(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Apply a module's forward pre-hooks to its input; with sequence parallelism they gather it."""
    for hook in module._forward_pre_hooks.values():
        (x,) = hook(module, (x,))
    return x


def checkpoint_activations(model: Decoder, plan: ActivationPlan, compile_backend: str = "inductor") -> None:
    """Make the blocks of a model or pipeline stage recompute what the plan says. No parameter name changes."""
    last = LastRecomputed()
    for block, recomputed in zip(model.blocks(), plan.recomputed, strict=True):
        if recomputed:
            # The method is wrapped, not the module: hooks around a block (gathering sharded weights) run once, those
            # inside (collectives of tensor parallelism) run again with the step that they belong to.
            forward = _recomputing_forward(block, recomputed, last, compile_backend)
            block.forward = forward  # type: ignore[method-assign]


def _recomputing_forward(
    block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed, compile_backend: str
) -> Callable[..., torch.Tensor]:
    forward: Callable[..., torch.Tensor] = RecomputingForward(block, recomputed, last)
    # If the block is compiled, compile the wrapper: block and recomputation are one graph.
    if not hasattr(block.forward, "_torchdynamo_orig_callable"):
        return forward
    return torch.compile(forward, dynamic=False, backend=compile_backend)
