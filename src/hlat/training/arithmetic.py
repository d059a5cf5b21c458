"""Names of what computes the model of a run: the same on all processes, saved, compared with the loaded checkpoint.

recipe, device -> Arithmetic --> every checkpoint
saved names    -> Arithmetic --> differences, which a resumed run reports: its bits are no longer those before it
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from hlat.config import Recipe
from hlat.model import attention_backend, product_library
from hlat.model.kernels import describe_attention, describe_kernels
from hlat.parallel import decide_compilation
from hlat.precision import MODES
from hlat.runtime.backend import ONEDNN, TORCH
from hlat.runtime.distributed import Runtime

_SUBJECTS = {
    "kernels": "norms, RoPE, SwiGLU and loss",
    "attention": "attention",
    "products": "products with weights",
}


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
        model, compute = recipe.model, MODES[recipe.precision.mode].compute
        heads = (model.heads, model.n_kv_heads, model.n_head_dim)
        by_document = recipe.data.isolate or model.window(recipe.data.sequence_length) is not None
        compiles = decide_compilation(recipe, runtime.device, runtime.world).on
        return cls(
            describe_kernels(runtime.device),
            attention_backend(*heads, compute, runtime.device, by_document),
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
        earlier = saved.by_subject()
        for subject, now in self.by_subject().items():
            if now != earlier[subject]:
                yield (
                    f"{subject}: computed by {now}, before the checkpoint by {earlier[subject]}: they round "
                    "differently, so the run will not be bitwise the one that was not interrupted"
                )
