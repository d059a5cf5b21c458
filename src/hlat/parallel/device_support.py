"""Support by the device of a run: ``torch.compile`` for decoder blocks, and everything that cannot run on it.

    recipe, device, world size --decide_compilation--> Compilation(on, reason) -> compile_blocks
    recipe, world size, device, process group --device_problems--> one sentence for each thing that cannot run

All blocks of a model share one graph, compiled once in the first step; embedding, head and loss are not compiled. Code
around a block (gathering its sharded parameters, recomputing it) stays outside of the graph.

Runs and rehearsals ask the same function: a run about the device that it is on, a rehearsal about one that is not here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hlat.config import ParallelConfig, Recipe, compile_obstacle
from hlat.model import Decoder, flops_per_token
from hlat.optim import optimizer_spec
from hlat.parallel.layout import Layout
from hlat.precision import MODES, check_fp8
from hlat.runtime.backend.base import Backend
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError


@dataclass(frozen=True)
class Compilation:
    """Decision about compiling blocks; ``reason`` is empty if they are."""

    on: bool
    reason: str = ""

    def __str__(self) -> str:
        return "compiled" if self.on else f"not compiled: {self.reason}"


def decide_compilation(recipe: Recipe, device: torch.device, world: int = 1) -> Compilation:
    """Decide if blocks are compiled; the recipe has a resolved precision mode.

    LaunchError: run.compile=blocks, but there is no compiler, or it does not support the device.
    """
    # Combinations that cannot work are rejected earlier, by recipe validation.
    if recipe.run.compile == "blocks":
        if obstacle := backend_of(device).compile_obstacle(device):
            raise LaunchError(f"run.compile=blocks: {obstacle}. Use run.compile=auto, which does not compile then.")
        if missing := missing_compiler(device):
            raise LaunchError(missing)
        return Compilation(True)
    reason = "run.compile=none" if recipe.run.compile == "none" else _reason_against(recipe, device, world)
    return Compilation(not reason, reason)


def _reason_against(recipe: Recipe, device: torch.device, world: int) -> str:
    """Reason not to compile; empty if compiling pays."""
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) * recipe.total_tokens
    backend, compute = backend_of(device), MODES[recipe.precision.mode].compute
    if reason := compile_refusal(recipe.parallel, compute, flops, world, backend, device):
        return reason
    compiler = backend.compiler
    return "" if compiler is None or compiler.is_available() else f"no {compiler.missing} found"


def compile_refusal(
    layout: ParallelConfig, compute: torch.dtype, flops: float, world: int, backend: Backend, device: torch.device
) -> str:
    """Reason why run.compile=auto does not compile a run of so many FLOPs although it could; empty if it does."""
    if reason := compile_obstacle(layout.pipeline, layout.schedule):
        return f"parallel.schedule={layout.schedule} {reason}"
    return backend.compile_refusal(compute, flops, world, device)


def missing_compiler(device: torch.device) -> str:
    """Say what run.compile=blocks lacks; empty if nothing."""
    compiler = backend_of(device).compiler
    if compiler is None or compiler.is_available():
        return ""
    headers, package = (" and Python's header files", " and python3-dev") if compiler.needs_headers else ("", "")
    return (
        f"run.compile=blocks: torch.compile needs a {compiler.language} compiler{headers}, and finds none. "
        f"Install {compiler.package} (or name one in {compiler.variable}){package}, or use run.compile=none."
    )


def check_isolation(device: torch.device, window: int | None = None, softmax: str = "") -> None:
    """Raise LaunchError if intra-document attention cannot run here: for a field of softmax, a window or isolation."""
    # On accelerators it is flex attention, which must be compiled.
    kernel, compiler = backend_of(device).document_kernel, backend_of(device).compiler
    needed_for, remedy = "data.isolate=true", "Use data.isolate=false, or run.device=cpu."
    if window is not None:
        needed_for = f"model.sliding_window={window}"
        remedy = f"Use data.sequence_length={window}, which fits into the window, or run.device=cpu."
    if softmax:
        needed_for, remedy = softmax, "Use run.device=cpu."
    if kernel is None:
        reason = f"torch's flex attention does not support the device {device.type}"
    elif kernel.is_compiled and (obstacle := backend_of(device).compile_obstacle(device)):
        reason = f"on an accelerator, attention within documents is compiled, and {obstacle}"
    elif kernel.is_compiled and compiler is not None and not compiler.is_available():
        needed = f"is compiled, but torch.compile finds no {compiler.missing}"
        reason = f"on an accelerator, attention within documents {needed}"
        remedy = f"Install {compiler.package} (or name a compiler in {compiler.variable}). Else: {remedy}"
    else:
        return
    raise LaunchError(f"{needed_for}: attention within documents cannot run here: {reason}. {remedy}")


def compile_blocks(model: Decoder, device: torch.device) -> None:
    """Compile the forward methods of all blocks, for static shapes."""
    name = backend_of(device).compile_backend
    for block in model.blocks():
        block.forward = torch.compile(block.forward, dynamic=False, backend=name)  # type: ignore[method-assign]


def needs_whole_matrices(recipe: Recipe) -> bool:
    """Return True if the optimizer updates matrices as a whole."""
    return optimizer_spec(recipe.optimizer, recipe.precision.mode).matrix_dtype is not None


def device_problems(recipe: Recipe, world: int, device: torch.device, can_send: bool) -> list[str]:
    """Return the reasons why a device cannot run a recipe with a resolved mode, each with a remedy."""
    return [*_of_the_device(recipe, world, device), *_of_its_groups(recipe, world, device, can_send)]


def _of_the_device(recipe: Recipe, world: int, device: torch.device) -> Iterator[str]:
    if recipe.precision.mode == "fp8":
        yield from _error_of(lambda: check_fp8(device))
    backend = backend_of(device)
    if recipe.precision.in_hardware and not backend.rounds_in_hardware:
        yield (
            f"precision.rounding=hardware: {backend.device_type} devices do not round stochastically. Use "
            "precision.rounding=software, which does so in the optimizer."
        )
    model, window = recipe.model, recipe.model.window(recipe.data.sequence_length)
    cap = f"model.attn_logit_softcapping={model.attn_logit_softcapping}"
    softmax = "" if not model.alters_softmax else "model.attention_sinks=true" if model.attention_sinks else cap
    if recipe.data.isolate or window is not None or softmax:
        yield from _error_of(lambda: check_isolation(device, None if recipe.data.isolate else window, softmax))
    yield from _error_of(lambda: decide_compilation(recipe, device, world))


def _of_its_groups(recipe: Recipe, world: int, device: torch.device, can_send: bool) -> Iterator[str]:
    layout, backend = Layout.of(recipe.parallel, world), backend_of(device)
    if layout.pipeline > 1 and not can_send:
        yield (
            f"parallel.pipeline={layout.pipeline}: the process group of {backend.device_type} devices has no send and "
            "receive here. Use parallel.pipeline=1 with a larger parallel.tensor or parallel.zero, or a newer release."
        )
    exchanges = needs_whole_matrices(recipe) and layout.data * layout.context * layout.tensor > 1
    if exchanges and not backend.unequal_all_to_all:
        yield (
            f"optimizer.kind={recipe.optimizer.kind}: it exchanges whole matrices, and the process group of "
            f"{backend.device_type} devices has no all-to-all of different sizes. Use optimizer.kind=adamw."
        )


def _error_of(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except LaunchError as error:
        yield str(error)
