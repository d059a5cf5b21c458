"""``torch.compile`` for decoder blocks: decide if it pays, check if it is possible, and compile.

    recipe, device, world size --decide_compilation--> Compilation(on, reason) -> compile_blocks

All blocks of a model share one graph, compiled once in the first step; embedding, head and loss are not compiled. Code
around a block (gathering its sharded parameters, recomputing it) stays outside of the graph.
"""

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from hlat.config import Recipe
from hlat.model import Decoder
from hlat.model.derived import flops_per_token
from hlat.precision import MODES
from hlat.runtime import LaunchError
from hlat.runtime.backend import has_fast_bf16

_ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv")
_FLEX_DEVICES = ("cuda", "xpu")  # device types on which flex attention is differentiable; it has to be compiled

LONG_RUN = 1.5e14
"""FLOPs of a run per CPU thread of all its processes from which compiling pays: ten minutes on a core with AMX.

Measured: 5 to 26 s of start-up for 1.18 to 1.30 times the speed (docs/notebook/cpu-settings.md). The decision depends
on the recipe only, not on a measurement, so that a resumed run decides as the original run did."""


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
            message = (
                "run.compile=blocks: torch.compile needs a C++ compiler and Python's header files, and finds none."
            )
            remedy = "Install g++ (or name one in CXX) and python3-dev, or use run.compile=none."
            raise LaunchError(f"{message} {remedy}")
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
    if device.type == "cpu":
        reason = _reason_against_on_cpu(recipe, world)
        if reason:
            return reason
    elif device.type != "cuda":
        return f"no known benefit on {device.type}; run.compile=blocks forces it"
    language = "C++" if device.type == "cpu" else "C"
    return "" if _has_compiler(device) else f"no {language} compiler found"


def _reason_against_on_cpu(recipe: Recipe, world: int) -> str:
    """Give the reason not to compile on this CPU; empty if the run is long enough to recover the start-up time."""
    if MODES[recipe.precision.mode].compute != torch.bfloat16 or not has_fast_bf16(torch.device("cpu")):
        return "little gain on a CPU without bf16 instructions or in fp32; run.compile=blocks forces it"
    tokens = recipe.total_steps * recipe.tokens_per_step
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) * tokens
    if flops < LONG_RUN * torch.get_num_threads() * world:
        return "the run is too short to recover the compilation time; run.compile=blocks forces it"
    return ""


def check_isolation(device: torch.device) -> None:
    """Check that intra-document attention can run here. On accelerators it is flex attention, which must be compiled.

    Raises:
        LaunchError: there is no compiler, or flex attention does not support the device.
    """
    if device.type == "cpu" or (device.type in _FLEX_DEVICES and _has_compiler(device)):
        return
    remedy = "Use data.isolate=false, or run.device=cpu."
    if device.type in _FLEX_DEVICES:
        reason = "on an accelerator, attention within documents is compiled, but torch.compile finds no C compiler"
        remedy = f"Install gcc (or name a compiler in CC). Else: {remedy}"
    else:
        reason = f"torch's flex attention does not support the device {device.type}"
    raise LaunchError(f"data.isolate=true: attention within documents cannot run here: {reason}. {remedy}")


def _has_compiler(device: torch.device) -> bool:
    """True if torch.compile can build code: on a CPU C++ with Python's headers, elsewhere Triton's launchers in C."""
    if device.type == "cpu" and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False
    names = ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc")
    chosen = os.environ.get("CXX" if device.type == "cpu" else "CC")
    return any(shutil.which(name) is not None for name in ((chosen,) if chosen else names))


def compile_blocks(model: Decoder) -> None:
    """Compile the forward methods of all blocks, for static shapes."""
    for block in model.blocks():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
