"""A decoder block that keeps less: some steps of its forward pass are run again in backward.

    x -> attention_input -> qkv -> attention_output -> residual -> feed_forward_input -> gate_up -> inner -> down
           norm, gather    product   core attention   product, +      norm, gather        product   SwiGLU   product, +

For each recomputed step, what others keep of its results and what it keeps itself (norm scales, attention's log-sums,
narrow copies of weights) is replaced, when autograd saves it, by a note of the step. The first note that backward asks
for runs the step again, from what is kept or from the steps before it; every result waits for the others that will ask,
so that nothing runs twice in one backward pass. Whatever is not recomputed goes through untouched.

Why hooks on saved tensors (``torch.autograd.graph.saved_tensors_hooks``), and not torch's selective checkpointing: that
dispatches every operation of a block through Python, twice, forbids operations in place, and knows operations, not what
they are for; here only saved tensors are looked at, and a step is exactly a piece of the block. (Compiled, the price is
paid once: ``compiled.py``.) And not torch's ``checkpoint``, which knows single passes over a block: schedules that
split backward ask twice and in another order, and it would compute a block again for each of its parameters.

What is computed again calls the same functions with the same shapes, strides and flags, hence the same kernels: the
bits are those of the first time. Collectives inside a step (the gathers of sequence and context parallelism, the sum
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
from hlat.model import DecoderBlock, DocumentMask, LayerCache

Rope = tuple[torch.Tensor, torch.Tensor]


class _Enough(Exception):
    """All that a step has to give again is there; the rest of it need not run."""


def _storage(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common; where the memory itself is, tensors of a rehearsal cannot say."""
    return int(tensor.untyped_storage()._cdata)


class _Step:
    """One recomputed step of one forward pass.

    Args:
        passes: of the block, shared by its steps.
        function: what it does.
        inputs: where its arguments come from, and whether they require a gradient.
        results: whether its results are computed again, or only what it keeps for its own backward.
    """

    def __init__(
        self,
        passes: "_Passes",
        function: Callable[..., Any],
        inputs: Sequence[tuple[Any, bool]],
        results: bool,
    ) -> None:
        self._passes, self._function, self._inputs, self.results = passes, function, inputs, results
        self.internals = 0  # tensors that it keeps itself
        self.notes = 0  # saved tensors that are replaced by a note
        self._waiting = 0  # notes that have not been asked for since it ran again
        self._runs = 0
        self._again: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def take(self, internal: bool, index: int) -> torch.Tensor:
        """A tensor that a note stands for."""
        found = self._both()[internal][index]
        self._waiting -= 1
        if self._waiting <= 0 and not self._passes.several:
            self._again = None
        return found

    def forget(self) -> None:
        """Give back what has been computed again."""
        self._again = None

    def _both(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Its results and what it keeps itself."""
        if self._again is not None:
            return self._again
        self._passes.begin(second=self._runs > 0)
        again = self._run()
        self._runs += 1
        self._waiting = self.notes
        if self.notes:
            self._again = again
        return again

    def _run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        arguments = self._arguments()
        known = {_storage(argument) for argument in arguments} | self._passes.parameters()
        internals: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> None:
            if _storage(tensor) not in known:
                internals.append(tensor.detach())
                if not self.results and len(internals) == self.internals:
                    raise _Enough

        outputs: Any = ()
        # With gradients, though none is asked for: kernels are chosen by whether one will be.
        with torch.enable_grad(), saved_tensors_hooks(note, _never), suppress(_Enough):
            outputs = self._function(*arguments)
        if len(internals) != self.internals:
            message = f"a step kept {self.internals} tensors in forward and {len(internals)} when it ran again"
            raise RuntimeError(message)
        return [output.detach() for output in _several(outputs)], internals

    def _arguments(self) -> list[torch.Tensor]:
        fresh: dict[_Step, list[torch.Tensor]] = {}
        arguments = []
        for source, differentiable in self._inputs:
            if isinstance(source, torch.Tensor):
                tensor = source
            else:
                step, index = source
                if step not in fresh:
                    fresh[step] = step._both()[0]
                tensor = fresh[step][index]
            arguments.append(tensor.detach().requires_grad_(differentiable))
        return arguments


def _several(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("the graph of a step that ran again is not differentiated")


class _Note:
    """Stands for a saved tensor: the result of a step, or what it keeps itself, seen with a certain geometry."""

    def __init__(self, step: _Step, internal: bool, index: int, tensor: torch.Tensor) -> None:
        self._step, self._internal, self._index = step, internal, index
        self._geometry = (tensor.shape, tensor.stride(), tensor.storage_offset())
        step.notes += 1

    def tensor(self) -> torch.Tensor:
        """That tensor again."""
        return self._step.take(self._internal, self._index).as_strided(*self._geometry)


def _unpack(saved: "torch.Tensor | _Note") -> torch.Tensor:
    return saved.tensor() if isinstance(saved, _Note) else saved


class LastRecomputed:
    """Which block's steps ran again last, of all blocks of a model."""

    def __init__(self) -> None:
        self.passes: ref[_Passes] | None = None


class _Passes:
    """What the steps of one forward pass of a block know of the backward passes over it.

    In the usual single pass a result is given back when all have had it. A schedule that splits backward comes back for
    the weights' gradients, in an order of its own: then results stay until another block has its turn.
    """

    def __init__(self, block: DecoderBlock, last: LastRecomputed) -> None:
        self._block, self._last = block, last
        self.steps: list[ref[_Step]] = []
        self.several = False

    def parameters(self) -> set[int]:
        """Where the parameters lie at this moment: sharded ones come and go."""
        return {_storage(parameter) for parameter in self._block.parameters()}

    def begin(self, second: bool) -> None:
        """A step is about to run again."""
        self.several = self.several or second
        previous = self._last.passes() if self._last.passes is not None else None
        if previous is not self:
            if previous is not None and previous.several:
                previous.forget()
            self._last.passes = ref(self)

    def forget(self) -> None:
        """Give back all that has been computed again."""
        for step in self.steps:
            here = step()
            if here is not None:
                here.forget()


class _Forward:
    """One forward pass of a block: runs its steps and notes what need not be kept."""

    def __init__(self, block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed) -> None:
        self._recomputed = recomputed
        self._passes = _Passes(block, last)
        self._parameters = self._passes.parameters()
        self._results: dict[int, tuple[_Step, int]] = {}  # by storage; all of them are alive
        self._inside: _Step | None = None
        self._entered: set[int] = set()

    def step(self, name: str, function: Callable[..., Any], *inputs: torch.Tensor, own: str = "") -> Any:
        """Run a step, to run again in backward where its results, by name, or what it keeps itself, are not kept."""
        results = name in self._recomputed
        if not results and own not in self._recomputed:
            return function(*inputs)
        sources = [(self._source(one), one.requires_grad) for one in inputs]
        step = self._inside = _Step(self._passes, function, sources, results)
        self._entered = {_storage(one) for one in inputs}
        try:
            outputs = function(*inputs)
        finally:
            self._inside = None
        self._passes.steps.append(ref(step))
        if results:
            for index, output in enumerate(_several(outputs)):
                self._results[_storage(output)] = (step, index)
        return outputs

    def _source(self, tensor: torch.Tensor) -> Any:
        return self._results.get(_storage(tensor), tensor.detach())

    def pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Note":
        """What autograd keeps in place of a tensor."""
        storage = _storage(tensor)
        if storage in self._results:
            step, index = self._results[storage]
            return _Note(step, False, index, tensor)
        step_inside = self._inside
        if step_inside is None or storage in self._entered or storage in self._parameters:
            return tensor
        step_inside.internals += 1
        return _Note(step_inside, True, step_inside.internals - 1, tensor)

    def forget_but(self, tensor: torch.Tensor) -> None:
        """Of the results so far only this one goes on: the memory of the others may soon be that of something else."""
        storage = _storage(tensor)
        self._results = {here: result for here, result in self._results.items() if here == storage}


class RecomputingForward:
    """A block's forward pass that keeps less, for ``block.forward``.

    Args:
        block: its modules are called with all hooks that there are, apart from hooks after ``attention`` and
            ``feed_forward`` themselves, of which there may be none.
        recomputed: names of ``hlat.model.derived.RECOMPUTABLE``.
        last: shared by the blocks of a model.
    """

    def __init__(self, block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed) -> None:
        assert not block.attention._forward_hooks and not block.feed_forward._forward_hooks, "they would not run"
        self._block, self.recomputed, self._last = block, recomputed, last
        # A compiled forward method is traced from the start, with what it recomputes inside.
        self._plain = getattr(block.forward, "_torchdynamo_orig_callable", block.forward)
        self._contexts = contexts(recomputed, block.attention.coalesce)

    def __call__(
        self,
        x_BSD: torch.Tensor,
        rope: Rope,
        cache: LayerCache | None = None,
        document_mask: DocumentMask | None = None,
    ) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        if not torch.is_grad_enabled():
            return self._plain(x_BSD, rope, cache, document_mask)
        assert cache is None, "generation needs no gradients"
        if torch.compiler.is_compiling():
            kept: torch.Tensor = checkpoint(
                lambda x, rope: self._plain(x, rope, None, document_mask),  # what is no tensor may not be an argument
                x_BSD,
                rope,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=self._contexts,
            )
            return kept
        forward = _Forward(self._block, self.recomputed, self._last)
        with saved_tensors_hooks(forward.pack, _unpack):
            residual_BSD = _attention(self._block, forward, x_BSD, rope, document_mask)
            forward.forget_but(residual_BSD)
            return _feed_forward(self._block, forward, residual_BSD)


def _attention(
    block: DecoderBlock, run: _Forward, x_BSD: torch.Tensor, rope: Rope, document_mask: DocumentMask | None
) -> torch.Tensor:
    attention = block.attention
    entering = run.step("attention_input", lambda x: _entered(attention, block.attention_norm(x)), x_BSD)
    q, k, v = run.step("qkv", lambda x: attention.project(x, rope), entering)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.attend(q, k, v, None, document_mask)

    heads = run.step("attention_output", attend, q, k, v, own="attention_log_sum")
    out: torch.Tensor = run.step("residual", lambda x, heads: x + attention.output(heads), x_BSD, heads)
    return out


def _feed_forward(block: DecoderBlock, run: _Forward, residual_BSD: torch.Tensor) -> torch.Tensor:
    layer = block.feed_forward
    entering = run.step("feed_forward_input", lambda x: _entered(layer, block.feed_forward_norm(x)), residual_BSD)
    gate_up = run.step("gate_up", layer.project, entering)
    inner = run.step("inner", layer.activate, *gate_up)
    out: torch.Tensor = residual_BSD + run.step("", layer.down, inner, own="down_weight_copy")
    return out


def _entered(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the hooks of a module make of its input: under sequence parallelism they gather it."""
    for hook in module._forward_pre_hooks.values():
        (x,) = hook(module, (x,))
    return x
