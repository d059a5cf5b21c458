"""Decisions that the program takes on a device, in the words of a table: kernels, dtypes, compilation, memory, groups.

recipe, world size, backend of the device --> the functions that training asks --> Decision(name, choice, reason)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hlat.config import Recipe
from hlat.model import attention_kernel, builds_masks, recipe_heads
from hlat.optim import optimizer_spec
from hlat.parallel import decide_compilation
from hlat.precision import MODES
from hlat.runtime.backend.table import backend_of


@dataclass(frozen=True)
class Decision:
    """One decision.

    Attributes:
        name: subject of the decision.
        choice: the alternative that is taken.
        reason: explanation or consequence; may be empty.
    """

    name: str
    choice: str
    reason: str = ""


def decide(recipe: Recipe, world: int, device: torch.device) -> list[Decision]:
    """Take the decisions of a run on a device, which may be simulated.

    Args:
        recipe: recipe with a resolved precision mode.
        world: number of processes.
        device: the device.
    """
    return [
        *_arithmetic(recipe, device),
        *_attention(recipe, device),
        *_execution(recipe, world, device),
        *_processes(world, device),
    ]


def _arithmetic(recipe: Recipe, device: torch.device) -> Iterator[Decision]:
    backend, mode = backend_of(device), MODES[recipe.precision.mode]
    products = backend.product_dtype(mode.compute)
    emulated = mode.compute == torch.bfloat16 and not backend.has_fast_bf16(device)
    note = "emulated: slower than fp32" if emulated and products == mode.compute else "accumulated in fp32"
    yield Decision("precision", recipe.precision.mode, f"weights {_name(mode.weights)}, moments {_name(mode.moments)}")
    yield Decision("products", backend.product_format(products), note)
    yield Decision("optimizer", optimizer_spec(recipe.optimizer, recipe.precision.mode).kernel(device))
    yield Decision("rounding", recipe.precision.rounding)
    wide = "on the device, in float64" if backend.float64 else "on the host: the device has no float64"
    yield Decision("bias corrections of bf16 AdamW", wide)
    embedding = mode.weights == torch.bfloat16 and backend.rounds_embedding_gradients
    yield Decision("gradient of the embedding", "summed in fp32 by hlat" if embedding else "by torch's kernel")


def _attention(recipe: Recipe, device: torch.device) -> Iterator[Decision]:
    kernel = attention_kernel(recipe_heads(recipe), recipe.run.determinism is not False, device)
    kept = "keeps the scores of all pairs of positions" if kernel.name == "math" else "keeps no scores"
    yield Decision("attention", str(kernel), kept)
    if recipe.parallel.context > 1:
        built = "built, chunk x prefix per layer" if builds_masks(device) else "none: the kernel aligns them"
        yield Decision("masks of context parallelism", built)


def _execution(recipe: Recipe, world: int, device: torch.device) -> Iterator[Decision]:
    backend = backend_of(device)
    compilation = decide_compilation(recipe, device, world)
    choice = f"compiled by {backend.compile_backend}" if compilation.on else "eager"
    yield Decision("blocks", choice, compilation.reason or "counted here as eager ones, which keep more")
    mode = "on" if recipe.run.deterministic and backend.deterministic_mode else "off"
    asked = "it turns fused execution off" if recipe.run.deterministic and mode == "off" else ""
    yield Decision("torch's deterministic mode", mode, asked)
    pins = "pinned" if backend.pins_memory else "pageable"
    yield Decision("host memory of batches and saved state", pins)


def _processes(world: int, device: torch.device) -> Iterator[Decision]:
    backend = backend_of(device)
    library = "none: one process" if world == 1 or backend.collectives is None else backend.collectives.name
    yield Decision("process group", library)
    if world == 1:
        return
    order = "after joining the group" if backend.group_before_device else "before joining the group"
    yield Decision("device of a process", f"selected {order}")
    if backend.group_differs:
        yield Decision("groups", "tried at the start", "releases differ in what they can do")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
