"""``torch.compile`` for decoder blocks: decide if it pays, check if it is possible, and compile.

    recipe, device, world size --decide_compilation--> Compilation(on, reason) -> compile_blocks

All blocks of a model share one graph, compiled once in the first step; embedding, head and loss are not compiled. Code
around a block (gathering its sharded parameters, recomputing it) stays outside of the graph.
"""

from dataclasses import dataclass

import torch

from hlat.config import Recipe
from hlat.model import Decoder
from hlat.model.derived import flops_per_token
from hlat.precision import MODES
from hlat.runtime import LaunchError
from hlat.runtime.backend import backend_of

_ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv")


@dataclass(frozen=True)
class Compilation:
    """Decision about compiling blocks.

    Attributes:
        on: True if blocks are compiled.
        reason: why they are not compiled; empty if they are.
    """

    on: bool
    reason: str = ""

    def __str__(self) -> str:
        return "compiled" if self.on else f"not compiled: {self.reason}"


def decide_compilation(recipe: Recipe, device: torch.device, world: int = 1) -> Compilation:
    """Decide if blocks are compiled. Combinations that cannot work are rejected earlier, by recipe validation.

    Args:
        recipe: recipe with a resolved precision mode.
        device: device of this process.
        world: number of processes of the run.

    Raises:
        LaunchError: run.compile=blocks, but there is no compiler.
    """
    if recipe.run.compile == "blocks":
        if not _has_compiler(device):
            raise LaunchError(_missing_compiler(device))
        return Compilation(True)
    reason = "run.compile=none" if recipe.run.compile == "none" else _reason_against(recipe, device, world)
    return Compilation(not reason, reason)


def _reason_against(recipe: Recipe, device: torch.device, world: int) -> str:
    """Give the reason not to compile; empty if compiling pays."""
    parallel = recipe.parallel
    if parallel.tensor > 1 or parallel.context > 1:
        return "tensor and context parallelism communicate inside blocks"
    if parallel.pipeline > 1 and parallel.schedule in _ZERO_BUBBLE:
        return f"{parallel.schedule} splits the backward pass of a block"
    backend = backend_of(device)
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) * recipe.total_tokens
    refusal = backend.compile_refusal(MODES[recipe.precision.mode].compute, flops, world)
    if refusal:
        return refusal
    return "" if _has_compiler(device) else f"no {backend.compiler.language} compiler found"


def _missing_compiler(device: torch.device) -> str:
    compiler = backend_of(device).compiler
    headers, package = (" and Python's header files", " and python3-dev") if compiler.needs_headers else ("", "")
    return (
        f"run.compile=blocks: torch.compile needs a {compiler.language} compiler{headers}, and finds none. "
        f"Install {compiler.package} (or name one in {compiler.variable}){package}, or use run.compile=none."
    )


def check_isolation(device: torch.device) -> None:
    """Check that intra-document attention can run here. On accelerators it is flex attention, which must be compiled.

    Raises:
        LaunchError: there is no compiler, or flex attention does not support the device.
    """
    kernel, compiler = backend_of(device).document_kernel, backend_of(device).compiler
    remedy = "Use data.isolate=false, or run.device=cpu."
    if kernel is None:
        reason = f"torch's flex attention does not support the device {device.type}"
    elif kernel.is_compiled and not _has_compiler(device):
        needed = f"is compiled, but torch.compile finds no {compiler.language} compiler"
        reason = f"on an accelerator, attention within documents {needed}"
        remedy = f"Install {compiler.package} (or name a compiler in {compiler.variable}). Else: {remedy}"
    else:
        return
    raise LaunchError(f"data.isolate=true: attention within documents cannot run here: {reason}. {remedy}")


def _has_compiler(device: torch.device) -> bool:
    """Return True if torch.compile can build code for a device."""
    return backend_of(device).compiler.is_available()


def compile_blocks(model: Decoder) -> None:
    """Compile the forward methods of all blocks, for static shapes."""
    for block in model.blocks():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
