"""Names of what computes the model of a run: the same on all processes, saved, compared with the loaded checkpoint.

recipe, device -> Arithmetic --> every checkpoint
saved names    -> Arithmetic --> differences: nobody asked for them? --refuse to resume, since the bits would differ
                                             run.deterministic=false, or the recipe has changed? --report them
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from hlat.checkpoint import RecipeChange
from hlat.config import Recipe
from hlat.model import attention_kernel, describe_attention, describe_kernels, product_library, recipe_heads
from hlat.parallel import decide_compilation
from hlat.precision import MODES
from hlat.runtime.backend.base import ONEDNN, TORCH
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import CheckpointError

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
    """Names of what computes the parts of a model. Runs with the same names have the same bits, as far as hlat decides.

    Attributes:
        kernels: computes norms, RoPE, SwiGLU and loss.
        attention: computes attention.
        products: computes products of weights and activations.
    """

    kernels: str = TORCH
    attention: str = TORCH
    products: str = TORCH

    @classmethod
    def of(cls, recipe: Recipe, runtime: Runtime) -> "Arithmetic":
        """Name what computes a recipe's model on this process's device.

        Args:
            recipe: with ``precision.mode`` resolved.
            runtime: device and number of processes.
        """
        compute = MODES[recipe.precision.mode].compute
        deterministic = recipe.run.determinism is not False
        compiles = decide_compilation(recipe, runtime.device, runtime.world).on
        return cls(
            describe_kernels(runtime.device),
            attention_kernel(recipe_heads(recipe), deterministic, runtime.device).name,
            "compiled code" if compiles else product_library(compute, runtime.device),
        )

    def saved_in(self, versions: Mapping[str, str]) -> "Arithmetic":
        """Return the names in the versions of a checkpoint. Earlier versions of hlat did not save all of them.

        They had no other kernels than torch's, and said nothing of products: those of fp32 were torch's.
        """
        own_attention = describe_attention() in self.attention
        earlier = {
            "kernels": TORCH,
            "attention": TORCH if own_attention else self.attention,
            "products": TORCH if self.products == ONEDNN else self.products,
        }
        return Arithmetic(**{each.name: versions.get(each.name, earlier[each.name]) for each in fields(self)})

    def names(self) -> dict[str, str]:
        """Return the names by part, as checkpoints and events have them."""
        return asdict(self)

    def by_subject(self) -> dict[str, str]:
        """Return the names by what they compute, for people."""
        return {subject: getattr(self, part) for part, subject in _SUBJECTS.items()}

    def differences(self, saved: "Arithmetic") -> Iterator[str]:
        """Yield a message for each part that another name computed before."""
        for subject in self._changed(saved).values():
            yield f"{subject}: they round differently, so the run will not be bitwise the one that was not interrupted"

    def check_resume(self, versions: Mapping[str, str], recipe: Recipe, changes: Iterable[RecipeChange]) -> None:
        """Check that what computes the model is what did before a checkpoint, or that somebody asked for the change.

        Args:
            versions: versions of the checkpoint.
            recipe: the present recipe; ``run.deterministic=false`` accepts every change.
            changes: its differences from the recipe of the checkpoint.

        Raises:
            CheckpointError: the bits would differ unasked, such as where there is no compiler or no space for it.
        """
        paths = [change.path for change in changes]
        unasked = [
            text
            for part, text in self._changed(self.saved_in(versions)).items()
            if part in versions and not any(path.startswith(_CAUSES[part]) for path in paths)
        ]
        if unasked and recipe.run.deterministic:
            raise CheckpointError(
                "\n  ".join(["the run cannot resume here bit for bit: other kernels compute its model", *unasked])
                + "\nResume where the same kernels are: with the same releases of hlat and Triton, the same compiler, "
                "the same kind of processor or accelerator, and space for temporary files. To accept other last bits: "
                "run.deterministic=false."
            )

    def _changed(self, saved: "Arithmetic") -> dict[str, str]:
        """Describe each part that another name computed before, by part."""
        now, before = self.names(), saved.names()
        return {
            part: f"{subject}: computed by {now[part]}, before the checkpoint by {before[part]}"
            for part, subject in _SUBJECTS.items()
            if now[part] != before[part]
        }
