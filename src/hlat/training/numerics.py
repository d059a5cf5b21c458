"""Precision, determinism and kernels of a run: settled once, before anything that depends on them is built.

    precision.rounding, seed, rank -> the device is told how to round, before its runtime starts
    precision.mode=auto, devices of all ranks, checkpoint -> recipe with a concrete precision mode
    run.deterministic=auto, kernels of attention, checkpoint -> recipe with true or false, and torch set to it

    recipe, device -> Arithmetic: names of what computes the model, the same on all processes --> every checkpoint
    saved names    -> Arithmetic --> differences: nobody asked for them? --refuse to resume, since the bits would differ
                                                 run.deterministic=false, or the recipe has changed? --report them

A checkpoint records what was resolved. A resumed run keeps it, on any device. Rounding may change: it is no state.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from hlat.checkpoint import RecipeChange, saved_determinism, saved_precision_mode
from hlat.config import Recipe
from hlat.model import (
    attention_kernel,
    describe_attention,
    describe_kernels,
    deterministic_by_default,
    product_library,
    recipe_heads,
)
from hlat.parallel import decide_compilation
from hlat.precision import AUTO, MODES, resolve_mode
from hlat.runtime.backend.base import ONEDNN, TORCH
from hlat.runtime.backend.device import configure_numerics, find_device_type, has_fast_bf16
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import CheckpointError
from hlat.runtime.process import RankInfo
from hlat.runtime.random_keys import stream_key


def configure_rounding(recipe: Recipe, here: RankInfo) -> None:
    """Let this process's device round as the recipe says, before it joins its run; raises LaunchError if it cannot."""
    # A seed of its own for every rank: errors of ranks that compute the same positions of different sequences are then
    # independent, and cancel in sums. The rules of a recipe see to it that no element is stored by two ranks.
    seed = stream_key(recipe.training.seed, "hardware rounding", here.rank) >> 33  # 31 bits
    backend_of(find_device_type(recipe.run.device)).configure_rounding(recipe.precision.in_hardware, seed)


def resolve_precision(
    recipe: Recipe, runtime: Runtime, saved_recipe: Mapping[str, Any] | None
) -> tuple[Recipe, str | None]:
    """Replace ``auto`` by a mode of ``MODES``, the same on every rank, and explain the choice if need be. Collective.

    ``saved_recipe`` is the ``recipe`` entry of the checkpoint to resume from; None for a new run.
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

    The precision mode has to be resolved before; ``saved_recipe`` is as for ``resolve_precision``.
    """
    asked = recipe.run.determinism
    if asked is None and saved_recipe is not None:
        asked = saved_determinism(saved_recipe)
    if asked is None:
        # All ranks: the kernels of one model have to agree.
        asked = all(runtime.ranks.all_gather(deterministic_by_default(recipe, runtime.device)))
    configure_numerics(runtime.device, asked)  # until here, auto was true
    return recipe.with_determinism(asked)


def emulation_warning(mode: str, device: torch.device) -> str | None:
    """Return a warning if a device without fast bf16 would emulate the products of a mode of ``MODES``."""
    compute = MODES[mode].compute
    # Where hlat itself multiplies bf16 as fp32, there is nothing to warn of.
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


_SUBJECTS = {
    "kernels": "norms, RoPE, SwiGLU and loss",
    "attention": "attention",
    "products": "products with weights",
}
_CAUSES = {
    "kernels": ("run.device",),
    "attention": ("run.device", "run.deterministic"),
    "products": ("run.device", "run.compile", "training.", "batch.", "parallel."),  # those of auto: length and layout
}
"""Beginnings of the fields whose change in the recipe asks for another name."""


@dataclass(frozen=True)
class Arithmetic:
    """Names of what computes the parts of a model. Runs with the same names have the same bits."""

    kernels: str = TORCH  # of norms, RoPE, SwiGLU and loss
    attention: str = TORCH
    products: str = TORCH  # of weights and activations

    @classmethod
    def of(cls, recipe: Recipe, runtime: Runtime) -> "Arithmetic":
        """Name what computes a recipe's model on this process's device; ``precision.mode`` has to be resolved."""
        compute = MODES[recipe.precision.mode].compute
        deterministic = recipe.run.determinism is not False
        compiles = decide_compilation(recipe, runtime.device, runtime.world).on
        return cls(
            describe_kernels(runtime.device),
            attention_kernel(recipe_heads(recipe), deterministic, runtime.device).name,
            "compiled code" if compiles else product_library(compute, runtime.device),
        )

    def saved_in(self, versions: Mapping[str, str]) -> "Arithmetic":
        """Return the names in the versions of a checkpoint; earlier versions of hlat did not save all of them."""
        # Earlier versions had no other kernels than torch's, and said nothing of products: those of fp32 were torch's.
        own_attention = describe_attention() in self.attention
        earlier = {
            "kernels": TORCH,
            "attention": TORCH if own_attention else self.attention,
            "products": TORCH if self.products == ONEDNN else self.products,
        }
        return Arithmetic(**{each.name: versions.get(each.name, earlier[each.name]) for each in fields(self)})

    def names(self) -> dict[str, str]:
        return asdict(self)

    def by_subject(self) -> dict[str, str]:
        """Return the names by what they compute, for people."""
        return {subject: getattr(self, part) for part, subject in _SUBJECTS.items()}

    def differences(self, saved: "Arithmetic") -> Iterator[str]:
        for subject in self._changed(saved).values():
            yield f"{subject}: they round differently, so the run will not be bitwise the one that was not interrupted"

    def check_resume(self, versions: Mapping[str, str], recipe: Recipe, changes: Iterable[RecipeChange]) -> None:
        """Check that what computes the model is what did before a checkpoint, or that somebody asked for the change.

        Raises:
            CheckpointError: the bits would differ unasked, such as where there is no compiler or no space for it.
        """
        paths = [change.path for change in changes]
        unasked = [
            text
            for part, text in self._changed(self.saved_in(versions)).items()
            if part in versions and not any(path.startswith(_CAUSES[part]) for path in paths)
        ]
        # run.deterministic=false accepts other bits.
        if unasked and recipe.run.deterministic:
            raise CheckpointError(
                "\n  ".join(["the run cannot resume here bit for bit: other kernels compute its model", *unasked])
                + "\nResume where the same kernels are: with the same releases of hlat and Triton, the same compiler, "
                "the same kind of processor or accelerator, and space for temporary files. To accept other last bits: "
                "run.deterministic=false."
            )

    def _changed(self, saved: "Arithmetic") -> dict[str, str]:
        now, before = self.names(), saved.names()
        return {
            part: f"{subject}: computed by {now[part]}, before the checkpoint by {before[part]}"
            for part, subject in _SUBJECTS.items()
            if now[part] != before[part]
        }
