"""Blocks through ``torch.compile``: where it pays, where it cannot, and why.

All blocks of a model are one graph, compiled once in the first step; embedding, head and loss stay as they are. What is
around a block (gathering its sharded parameters, recomputing it) stays outside of the graph.
"""

import os
import shutil
from dataclasses import dataclass

import torch

from hlat.config import Recipe
from hlat.model import Decoder
from hlat.runtime import LaunchError

_ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv")
_FLEX_DEVICES = ("cuda", "xpu")  # with gradients, and compiled


@dataclass(frozen=True)
class Compilation:
    """Whether blocks are compiled, and why they are not."""

    on: bool
    reason: str = ""

    def __str__(self) -> str:
        return "compiled" if self.on else f"not compiled: {self.reason}"


def compilation(recipe: Recipe, device: torch.device) -> Compilation:
    """What ``run.compile`` amounts to here. What it cannot be combined with, ``hlat check`` refuses.

    Raises:
        LaunchError: asked for, and there is no compiler.
    """
    if recipe.run.compile == "blocks":
        if not _has_compiler(device):
            message = "run.compile=blocks: torch.compile needs a C++ compiler here, and finds none."
            raise LaunchError(f"{message} Install g++ (or name one in CXX), or use run.compile=none.")
        return Compilation(True)
    reason = "run.compile=none" if recipe.run.compile == "none" else _against(recipe, device)
    return Compilation(not reason, reason)


def _against(recipe: Recipe, device: torch.device) -> str:
    """What speaks against compiling; nothing where it pays."""
    parallel = recipe.parallel
    if parallel.tensor > 1 or parallel.context > 1:
        return "tensor and context parallelism communicate inside of blocks"
    if parallel.pipeline > 1 and parallel.schedule in _ZERO_BUBBLE:
        return f"{parallel.schedule} takes the backward pass of a block apart"
    if device.type != "cuda":
        return f"a minute of start-up for a few percent on {device.type}; run.compile=blocks does it"
    return "" if _has_compiler(device) else "it needs a C compiler, and finds none"


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
    """On a CPU the generated code is C++; elsewhere Triton builds a launcher in C."""
    names = ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc")
    asked = os.environ.get("CXX" if device.type == "cpu" else "CC")
    return any(shutil.which(name) is not None for name in ((asked,) if asked else names))


def compile_blocks(model: Decoder) -> None:
    """Compile the forward methods of all blocks, for the shapes that come."""
    for block in model.blocks():
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
