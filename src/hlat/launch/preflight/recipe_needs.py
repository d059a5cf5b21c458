"""Needs of a recipe: memory of its fullest rank, space for checkpoints, and the groups of ranks of each axis.

    Recipe, number of processes, device --plan_needs--> rank_bytes, host_bytes, disk_bytes, groups

It imports all of parallelism: one rank process does, and the checks of a start where memory may be short.
"""

from collections.abc import Sequence

import torch

from hlat.config import Recipe
from hlat.launch.preflight.rank_measurements import Facts
from hlat.model import count_parameters
from hlat.optim import optimizer_spec
from hlat.parallel import AXES, Layout, StepShape, rank_bytes, stage_layer_counts
from hlat.precision import MODES, resolve_mode
from hlat.runtime.backend.device import has_fast_bf16
from hlat.runtime.backend.table import backend_of


def plan_needs(recipe: Recipe, world: int, device: torch.device) -> Facts:
    """Count what a run of a recipe on ``world`` processes needs.

    Returns:
        ``rank_bytes`` of the device, ``host_bytes`` per process, ``disk_bytes`` of the checkpoints that are kept while
        another is written, and ``groups``: by axis with more than one rank, all its groups of ranks.
    """
    recipe = recipe.in_mode(resolve_mode(recipe.precision.mode, has_fast_bf16(device)))
    steps = [StepShape.of(stage, world) for stage in recipe.each_stage()]
    peak = max(
        rank_bytes(step, rank, sizes).total for step in steps for rank, sizes in enumerate(stage_layer_counts(step))
    )
    on_host = backend_of(device).is_shared
    mode = recipe.precision.mode
    element = MODES[mode].weights.itemsize + optimizer_spec(recipe.optimizer, mode).state_bytes(True)
    checkpoint = count_parameters(recipe.model).total * (element + recipe.component_bytes)
    return {
        "rank_bytes": 0.0 if on_host else peak,
        "host_bytes": peak if on_host else 0.0,
        "disk_bytes": checkpoint * (recipe.checkpoint.keep_last + 1),
        "groups": _groups([step.layout for step in steps]),
    }


def _groups(layouts: Sequence[Layout]) -> dict[str, list[list[int]]]:
    """Return the groups of each axis, in the layouts of all stages."""
    found: dict[str, dict[tuple[int, ...], None]] = {}
    for layout in layouts:
        for axis, size in zip(AXES, layout.sizes, strict=True):
            groups = (tuple(layout.group(rank, axis)) for rank in range(layout.world))
            found.setdefault(axis, {}).update(dict.fromkeys(groups) if size > 1 else {})
    return {axis: [list(ranks) for ranks in groups] for axis, groups in found.items() if groups}
