"""Resolution of ``precision.mode=auto``, once, before anything that depends on the precision is built.

    precision.mode=auto, devices of all ranks, checkpoint -> recipe with a concrete precision mode

A checkpoint records the resolved mode. A resumed run keeps it, on any device.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hlat.checkpoint import saved_precision_mode
from hlat.config import Recipe
from hlat.precision import AUTO, MODES, resolve_mode
from hlat.runtime.backend import has_fast_bf16
from hlat.runtime.distributed import Runtime


def resolve_precision(
    recipe: Recipe, runtime: Runtime, saved_recipe: Mapping[str, Any] | None
) -> tuple[Recipe, str | None]:
    """Replace ``auto`` by a precision mode of ``MODES``, the same on every rank. Collective.

    Args:
        recipe: recipe of the run.
        runtime: process group and device of this rank.
        saved_recipe: the ``recipe`` entry of the metadata of the checkpoint to resume from; None for a new run.

    Returns:
        The recipe, and a line that explains the choice; None instead of the line if the recipe names a mode itself.
    """
    if recipe.precision.mode != AUTO:
        return recipe, None
    fast = all(runtime.ranks.all_gather(has_fast_bf16(runtime.device)))
    mode = resolve_mode(AUTO, fast) if saved_recipe is None else saved_precision_mode(saved_recipe)
    if mode not in MODES:  # no version has written such a mode
        return recipe.in_mode(resolve_mode(AUTO, fast)), None
    return recipe.in_mode(mode), f"precision.mode=auto: {_reason(mode, fast, new=saved_recipe is None)}"


def _reason(mode: str, fast: bool, new: bool) -> str:
    if new:
        return f"{mode}, as {'every' if fast else 'not every'} device has fast bf16"
    reason = f"{mode}, which the run began with"
    if MODES[mode].compute == torch.bfloat16 and not fast:
        return f"{reason}; not every device here has fast bf16, so fp32 might be faster"
    if mode == "fp32" and fast:
        return f"{reason}; every device here has fast bf16: a new run would be mixed, which is faster"
    return reason
