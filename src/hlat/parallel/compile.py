"""Blocks through ``torch.compile``: where it pays, where it cannot, and why.

All blocks of a model are one graph, compiled once in the first step; embedding, head and loss stay as they are. What is
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
_FLEX_DEVICES = ("cuda", "xpu")  # with gradients, and compiled

LONG_RUN = 1.5e14
"""FLOPs of a run, per thread of all its processes, from which compiling pays on a CPU: ten minutes on a core with AMX.

Measured: 5 to 26 s of start-up for 1.18 to 1.30 times the speed (docs/experiments.md). A count of the recipe and no
measurement, so that a resumed run compiles if the run did that it goes on from."""


@dataclass(frozen=True)
class Compilation:
    """Whether blocks are compiled, and why they are not."""

    on: bool
    reason: str = ""

    def __str__(self) -> str:
        return "compiled" if self.on else f"not compiled: {self.reason}"


def decide_compilation(recipe: Recipe, device: torch.device, world: int = 1) -> Compilation:
    """Decide what ``run.compile`` amounts to here. What it cannot be combined with, ``hlat check`` refuses.

    Args:
        recipe: with a resolved precision mode.
        device: of this process.
        world: the number of processes that share the run's work.

    Raises:
        LaunchError: asked for, and there is no compiler.
    """
    if recipe.run.compile == "blocks":
        if not _has_compiler(device):
            message = (
                "run.compile=blocks: torch.compile needs a C++ compiler and Python's headers here, and finds none."
            )
            remedy = "Install g++ (or name one in CXX) and python3-dev, or use run.compile=none."
            raise LaunchError(f"{message} {remedy}")
        return Compilation(True)
    reason = "run.compile=none" if recipe.run.compile == "none" else _against(recipe, device, world)
    return Compilation(not reason, reason)


def _against(recipe: Recipe, device: torch.device, world: int) -> str:
    """What speaks against compiling; nothing where it pays."""
    parallel = recipe.parallel
    if parallel.tensor > 1 or parallel.context > 1:
        return "tensor and context parallelism communicate inside of blocks"
    if parallel.pipeline > 1 and parallel.schedule in _ZERO_BUBBLE:
        return f"{parallel.schedule} takes the backward pass of a block apart"
    if device.type == "cpu":
        reason = _against_on_cpu(recipe, world)
        if reason:
            return reason
    elif device.type != "cuda":
        return f"not known to pay on {device.type}; run.compile=blocks forces it"
    language = "C++" if device.type == "cpu" else "C"
    return "" if _has_compiler(device) else f"no {language} compiler found"


def _against_on_cpu(recipe: Recipe, world: int) -> str:
    """Name what speaks against compiling on this CPU; nothing where the run is long enough to win back the start-up."""
    if MODES[recipe.precision.mode].compute != torch.bfloat16 or not has_fast_bf16(torch.device("cpu")):
        return "little gain on a CPU without bf16 instructions or in fp32; run.compile=blocks forces it"
    tokens = recipe.total_steps * recipe.tokens_per_step
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) * tokens
    if flops < LONG_RUN * torch.get_num_threads() * world:
        return "the run is too short to win back the start-up; run.compile=blocks forces it"
    return ""


def check_isolation(device: torch.device) -> None:
    """Attention within documents is torch's flex attention on accelerators, which is nothing without its compiler.

    Raises:
        LaunchError: there is none here, or it does not know the device.
    """
    if device.type == "cpu" or (device.type in _FLEX_DEVICES and _has_compiler(device)):
        return
    remedy = "Use data.isolate=false, or run.device=cpu."
    if device.type in _FLEX_DEVICES:
        reason = "on an accelerator it is compiled, and torch.compile finds no C compiler"
        remedy = f"Install gcc (or name a compiler in CC). Else: {remedy}"
    else:
        reason = f"torch's flex attention does not know the device {device.type}"
    raise LaunchError(f"data.isolate=true: documents cannot be kept apart here: {reason}. {remedy}")


def _has_compiler(device: torch.device) -> bool:
    """On a CPU the generated code is C++, which includes Python's headers; elsewhere Triton builds a launcher in C."""
    if device.type == "cpu" and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False
    names = ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc")
    asked = os.environ.get("CXX" if device.type == "cpu" else "CC")
    return any(shutil.which(name) is not None for name in ((asked,) if asked else names))


def compile_blocks(model: Decoder) -> None:
    """Compile the forward methods of all blocks, for the shapes that come."""
    for block in model.blocks():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
