"""Precision and determinism of a run, settled once, before anything that depends on them is built.

    precision.rounding, seed, rank -> the device is told how to round, before its runtime starts
    precision.mode=auto, devices of all ranks, checkpoint -> recipe with a concrete precision mode
    run.deterministic=auto, kernels of attention, checkpoint -> recipe with true or false, and torch set to it

A checkpoint records what was resolved. A resumed run keeps it, on any device. Rounding may change: it is no state.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hlat.checkpoint import saved_determinism, saved_precision_mode
from hlat.config import Recipe
from hlat.model import deterministic_by_default
from hlat.precision import AUTO, MODES, resolve_mode
from hlat.runtime.backend.device import configure_numerics, find_device_type, has_fast_bf16
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.randomness.rng_keys import stream_key
from hlat.runtime.rank_env import RankInfo


def configure_rounding(recipe: Recipe, here: RankInfo) -> None:
    """Let the device of this process round as the recipe says; to be called before the process joins its run.

    Every rank has a seed of its own: errors of ranks that compute the same positions of different sequences are then
    independent, and cancel in sums. No element is stored by two ranks, which the rules of a recipe see to.

    Args:
        recipe: recipe of the run.
        here: rank of this process.

    Raises:
        LaunchError: the device cannot, or the environment asks for the opposite.
    """
    seed = stream_key(recipe.training.seed, "hardware rounding", here.rank) >> 33  # 31 bits
    backend_of(find_device_type(recipe.run.device)).configure_rounding(recipe.precision.in_hardware, seed)


def resolve_precision(
    recipe: Recipe, runtime: Runtime, saved_recipe: Mapping[str, Any] | None
) -> tuple[Recipe, str | None]:
    """Replace ``auto`` by a precision mode of ``MODES``, the same on every rank. Collective.

    Args:
        recipe: recipe of the run.
        runtime: process group and device of this rank.
        saved_recipe: the ``recipe`` entry of the metadata of the checkpoint to resume from; None for a new run.

    Returns:
        The recipe, and a line that explains the choice, or warns of one that is slow here; None instead of the line
        if there is nothing to say.
    """
    fast = all(runtime.ranks.all_gather(has_fast_bf16(runtime.device)))
    if recipe.precision.mode != AUTO:
        return recipe, None if fast else emulation_warning(recipe.precision.mode, runtime.device)
    mode = resolve_mode(AUTO, fast) if saved_recipe is None else saved_precision_mode(saved_recipe)
    if mode not in MODES:  # no version has written such a mode
        return recipe.in_mode(resolve_mode(AUTO, fast)), None
    return recipe.in_mode(mode), f"precision.mode=auto: {_reason(mode, fast, new=saved_recipe is None)}"


def resolve_determinism(recipe: Recipe, runtime: Runtime, saved_recipe: Mapping[str, Any] | None) -> Recipe:
    """Replace ``run.deterministic=auto`` by the same value on every rank, and set torch to it. Collective.

    Args:
        recipe: recipe with a resolved precision mode.
        runtime: process group and device of this rank.
        saved_recipe: as for ``resolve_precision``.
    """
    asked = recipe.run.determinism
    if asked is None and saved_recipe is not None:
        asked = saved_determinism(saved_recipe)
    if asked is None:
        asked = all(runtime.ranks.all_gather(deterministic_by_default(recipe, runtime.device)))
    configure_numerics(runtime.device, asked)  # until here, auto was true
    return recipe.with_determinism(asked)


def emulation_warning(mode: str, device: torch.device) -> str | None:
    """Return a warning if products in the dtype of a mode would be emulated by a device without fast bf16.

    Args:
        mode: one of ``MODES``.
        device: device of this rank. Where hlat itself multiplies bf16 as fp32, there is nothing to warn of.
    """
    compute = MODES[mode].compute
    if compute != torch.bfloat16 or backend_of(device).product_dtype(compute) != compute:
        return None
    return (
        f"precision.mode={mode}: not every device multiplies bf16 in hardware (NVIDIA GPUs do from compute capability "
        "8.0 on); emulated products are slower than fp32. precision.mode=fp32 is faster here"
    )


def _reason(mode: str, fast: bool, new: bool) -> str:
    if new:
        return f"{mode}, as {'every' if fast else 'not every'} device has fast bf16"
    reason = f"{mode}, which the run began with"
    if MODES[mode].compute == torch.bfloat16 and not fast:
        return f"{reason}; not every device here has fast bf16, so fp32 might be faster"
    if mode == "fp32" and fast:
        return f"{reason}; every device here has fast bf16: a new run would be mixed, which is faster"
    return reason
