"""Between the parameters of a module and canonical tensors: Hugging Face names, never fused.

    module names, coalesced or not --to_canonical--> Hugging Face names --from_canonical--> module names, either way

The same functions serve weights, gradients and Adam moments, which have the shapes of the weights. Only rows move;
no value is computed, so both directions are exact in every dtype.
"""

from collections.abc import Iterable, Mapping

import torch

from hlat.config.sections import ModelConfig
from hlat.model.derived import parameter_layouts
from hlat.runtime import CheckpointError

_FEW_LAYERS = 1_000
_LISTED = 100  # at most so many problems are listed in an error


def canonical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every canonical tensor of a model, in the order of the data. Tied heads have none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in parameter_layouts(config).values():
        shapes |= layout.canonical_shapes
    return shapes


def to_canonical(config: ModelConfig, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical tensors from tensors under module parameter names.

    Args:
        config: the model whose names they are.
        named: whole (unsharded) tensors of the parameters' shapes; a subset of the parameters is fine.

    Returns:
        Tensors by canonical name: the given ones where nothing is fused, else copies.

    Raises:
        CheckpointError: names that the model does not have, or tensors of another shape; all of them are listed.
    """
    layouts = parameter_layouts(config)
    problems = [f"{name}: the model has no such parameter" for name in named if name not in layouts]
    problems += _wrong_shapes(named, {name: layout.shape for name, layout in layouts.items()})
    _refuse(problems, "these tensors are not the parameters of this model")
    canonical: dict[str, torch.Tensor] = {}
    for name, layout in layouts.items():
        if name in named:
            canonical |= layout.split(named[name])
    return canonical


def from_canonical(config: ModelConfig, canonical: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under module parameter names from canonical tensors; the inverse of ``to_canonical``.

    Raises:
        CheckpointError: names missing, unexpected, or of another shape; all of them are listed.
    """
    check_canonical(canonical_shapes(config), {name: tuple(tensor.shape) for name, tensor in canonical.items()})
    return {name: layout.fuse(canonical) for name, layout in parameter_layouts(config).items()}


def check_layers(config: ModelConfig, found: int, source: str) -> None:
    """See that a model may have so many tensors, before the names of all of its layers are made.

    Args:
        config: the model.
        found: number of tensors that there are.
        source: what errors call them.

    Raises:
        CheckpointError: it has more layers than there are tensors, of which each layer has several, and so many that
            it would take long to name what is missing.
    """
    if config.layers > max(found, _FEW_LAYERS):
        raise CheckpointError(
            f"{source} do not fit the model: it has {config.layers:,} layers, and there are {found:,} tensors."
        )


def check_canonical(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], source: str = "these weights"
) -> None:
    """Compare names and shapes.

    Raises:
        CheckpointError: every name missing, unexpected, or of another shape; the first of them where they are many.
    """
    problems = [f"{name}: missing, expected {_size(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"{name}: unexpected, the model has no such tensor" for name in found if name not in expected]
    problems += [
        f"{name}: is {_size(found[name])}, the model has {_size(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    _refuse(problems, f"{source} do not fit the model")


def _wrong_shapes(named: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name}: is {_size(tensor.shape)}, the model has {_size(expected[name])}"
        for name, tensor in named.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def _refuse(problems: list[str], head: str) -> None:
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        listed = [f"  {problem}" for problem in [*problems[:_LISTED], *more]]
        raise CheckpointError("\n".join([f"{head}: {len(problems)} problem(s)", *listed]))
