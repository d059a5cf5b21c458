"""Check of a recipe against a device: everything that devices of the type, or this chip, cannot do.

    recipe, world size, device, process group --device_problems--> one sentence for each thing that cannot run

Runs and rehearsals ask the same function: a run about the device that it is on, a rehearsal about one that is not here.
"""

from collections.abc import Callable, Iterator

import torch

from hlat.config import Recipe
from hlat.optim import optimizer_spec
from hlat.parallel.compile import check_isolation, decide_compilation
from hlat.parallel.mesh.mesh_layout import Layout
from hlat.precision import check_fp8
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError


def needs_whole_matrices(recipe: Recipe) -> bool:
    """Return True if the optimizer updates matrices as a whole."""
    return optimizer_spec(recipe.optimizer, recipe.precision.mode).matrix_dtype is not None


def device_problems(recipe: Recipe, world: int, device: torch.device, can_send: bool) -> list[str]:
    """Return the reasons why a device cannot run a recipe, all of them, each with a remedy.

    Args:
        recipe: a recipe validated for this number of processes, with a resolved precision mode.
        world: number of processes.
        device: the device.
        can_send: True if the process groups of the device have send and receive.
    """
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
    window = recipe.model.window(recipe.data.sequence_length)
    if recipe.data.isolate or window is not None:
        yield from _error_of(lambda: check_isolation(device, None if recipe.data.isolate else window))
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
