"""Out of memory on a device: one error that says what the rank held, and what would fit.

torch.OutOfMemoryError --> peaks of the allocator, bytes as plans count them, changes that fit --> DeviceMemoryError
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations

import torch

from hlat.config import Recipe, RecipeError, parse_recipe
from hlat.hardware import load_catalog
from hlat.parallel import ACCELERATOR, StepShape, rank_bytes, stage_layer_counts
from hlat.precision import resolve_mode
from hlat.runtime import errors
from hlat.runtime.backend.device import has_fast_bf16
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DeviceMemoryError
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV
from hlat.runtime.terminal_text import plural

Changes = tuple[str, ...]
"""Overrides of a recipe, such as ``("batch.micro_batch=1",)``."""

_UNKNOWN = "unknown"  # family of a chip that the catalog does not have


@contextmanager
def explained_out_of_memory(recipe: Recipe, runtime: Runtime, steps: Callable[[], int]) -> Iterator[None]:
    """Replace torch's error about a full device within the block by one that says what the rank held and what fits.

    Args:
        recipe: recipe of the run.
        runtime: device and rank of this process.
        steps: returns the steps that this process has done. In the first one a restart would fail in the same way.

    Raises:
        DeviceMemoryError: the device has too little memory.
    """
    try:
        yield
    except Exception as raised:
        error = next((each for each in errors.causes(raised) if isinstance(each, torch.OutOfMemoryError)), None)
        if error is None:
            raise
        done = steps()
        explained = DeviceMemoryError(
            f"rank {runtime.rank} ran out of memory on {backend_of(runtime.device).describe(runtime.device)}"
            f"{' after ' + plural(done, 'step') if done else ''}: {_request(error)}. {_held(runtime)} "
            f"{_advice(recipe, runtime)}"
        )
        # Processes of an earlier attempt may still hold memory.
        explained.retryable = done > 0 or EARLIER_ATTEMPT_ENV in os.environ
        raise explained from raised


def _request(error: torch.OutOfMemoryError) -> str:
    """Return what was asked for, which torch says in the first two sentences, without its advice on the allocator."""
    return ". ".join(str(error).partition("\n")[0].split(". ")[:2]).rstrip(".")


def _held(runtime: Runtime) -> str:
    backend, device = backend_of(runtime.device), runtime.device
    text = f"Its tensors took {_gib(backend.peak_memory_bytes(device))} at most"
    use = backend.allocator_use(device)
    if use is not None:
        text += f"; the allocator had reserved {_gib(use.reserved)}, and gave memory back {use.retries} times"
    return f"{text}; the device has {_gib(backend.memory_bytes(device))}."


def _advice(recipe: Recipe, runtime: Runtime) -> str:
    """Say what plans count for the recipe, and the changes that fit by that count."""
    from hlat.planner import USABLE_MEMORY_SHARE  # noqa: PLC0415 - only where memory is short

    recipe = recipe.in_mode(resolve_mode(recipe.precision.mode, has_fast_bf16(runtime.device)))
    needed = _needed(recipe, runtime)
    total, limit = sum(needed.values()), USABLE_MEMORY_SHARE * backend_of(runtime.device).memory_bytes(runtime.device)
    parts = ", ".join(f"{name} {_gib(each)}" for name, each in needed.items() if each)
    counted = f"Plans count {_gib(total)} for this rank: {parts}."
    if total <= limit:
        return f"{counted} That fits: look for other programs on the device, or for gaps between reserved and taken."
    fitting = _fitting(recipe, runtime, limit)
    if not fitting:
        return (
            f"{counted} Neither one sequence per micro-batch nor recomputation nor sharding is enough: use more "
            "devices (hlat plan says how many), or precision.mode=bf16-sr."
        )
    words = "; or ".join(f"{' '.join(changes)} ({_gib(need)})" for changes, need in fitting)
    return f"{counted} By the same count these fit: {words}."


def _needed(recipe: Recipe, runtime: Runtime) -> dict[str, float]:
    """Count bytes by purpose of the stage that this rank has, with what the device's runtime and allocator add."""
    from hlat.planner import device_overhead, has_fused_kernels  # noqa: PLC0415

    step = StepShape.of(recipe, runtime.world)
    pipeline_rank = runtime.rank // (runtime.world // step.layout.pipeline)
    name = backend_of(runtime.device).chip_name(runtime.device)
    chip = None if name is None else load_catalog().chip_by_torch_name(name)
    kernels = replace(ACCELERATOR, fused=chip is not None and has_fused_kernels(chip))
    counted = rank_bytes(step, pipeline_rank, stage_layer_counts(step)[pipeline_rank], kernels)
    temporary = {"gradients": 0.0, "activations": 0.0, **counted.transient}
    gradients, activations = temporary.pop("gradients"), temporary.pop("activations")
    others = sum(temporary.values())
    added = device_overhead(_UNKNOWN if chip is None else chip.family, activations + others)
    return {
        "parameters": counted.parameters,
        "optimizer": counted.optimizer,
        "gradients": gradients,
        "activations": activations,
        "temporary tensors": others,
        "the device's runtime and allocator": sum(added),
    }


def _fitting(recipe: Recipe, runtime: Runtime, limit: float) -> list[tuple[Changes, float]]:
    """Find the mildest change of each kind that fits, with the bytes it needs; if none does, one of several fields."""
    kinds = [kind for kind in (_smaller_batches(recipe), _stronger_policies(recipe), _shardings(recipe)) if kind]
    found = [first for kind in kinds if (first := _first_fitting(kind, recipe, runtime, limit)) is not None]
    if found:
        return found
    strongest = [kind[-1] for kind in kinds]
    several = [sum(some, ()) for count in (2, 3) for some in combinations(strongest, count)]
    together = _first_fitting(several, recipe, runtime, limit)
    return [] if together is None else [together]


def _smaller_batches(recipe: Recipe) -> list[Changes]:
    size = recipe.batch.micro_batch
    return [(f"batch.micro_batch={size >> halvings}",) for halvings in range(1, size.bit_length())]


def _stronger_policies(recipe: Recipe) -> list[Changes]:
    from hlat.planner import RECOMPUTE_POLICIES  # noqa: PLC0415

    policy = recipe.memory.activation_checkpointing
    at = RECOMPUTE_POLICIES.index(policy) + 1 if policy in RECOMPUTE_POLICIES else len(RECOMPUTE_POLICIES)
    return [(f"memory.activation_checkpointing={stronger}",) for stronger in RECOMPUTE_POLICIES[at:]]


def _shardings(recipe: Recipe) -> list[Changes]:
    stages = [(f"parallel.zero={stage}",) for stage in (1, 3) if stage > recipe.parallel.zero]
    return [(f"parallel.tensor={2 * recipe.parallel.tensor}",), *stages]


def _first_fitting(
    kind: Sequence[Changes], recipe: Recipe, runtime: Runtime, limit: float
) -> tuple[Changes, float] | None:
    """Return the first changes with which the recipe is valid and this rank fits, and the bytes that it needs."""
    for changes in kind:
        with suppress(RecipeError):
            changed = parse_recipe(recipe.model_dump(mode="json"), overrides=changes, world=runtime.world)
            needed = sum(_needed(changed, runtime).values())
            if needed <= limit:
                return changes, needed
    return None


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
