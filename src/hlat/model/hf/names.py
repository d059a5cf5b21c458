"""Convert between a module's parameters and canonical tensors (Hugging Face names, unfused).

    module names, coalesced or not --to_canonical--> Hugging Face names --from_canonical--> module names

The same functions convert weights, gradients and Adam moments, which have the shapes of the weights. They only reorder
rows, so both directions are exact in every dtype.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import torch

from hlat.config import ModelConfig
from hlat.model.derived.parameter_layout import parameter_layouts
from hlat.runtime.errors import CheckpointError
from hlat.runtime.terminal_text import plural

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_MANY_LAYERS = 1_000
_MAX_LISTED = 100  # problems listed in an error
_T = TypeVar("_T")


class TensorHeader(Protocol):
    """Shape and data type of a tensor, or of an entry of an index."""

    @property
    def shape(self) -> Iterable[int]:
        """Lengths of the dimensions."""

    @property
    def dtype(self) -> torch.dtype | str:
        """Data type of the elements, or a file's word for one that torch does not have."""


def canonical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every canonical tensor of a model, in order of execution. Tied heads have none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in parameter_layouts(config).values():
        shapes |= layout.canonical_shapes
    return shapes


def to_canonical(config: ModelConfig, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert tensors under module parameter names to canonical tensors.

    Args:
        config: the model that the names belong to.
        named: complete (unsharded) tensors with the parameters' shapes; they may be a subset of the parameters.

    Returns:
        Tensors by canonical name: the given tensors, or copies if they were fused.

    Raises:
        CheckpointError: names that the model does not have, or tensors of another shape; lists all (up to 100).
    """
    layouts = parameter_layouts(config)
    problems = [f"{name}: the model has no such parameter" for name in named if name not in layouts]
    problems += _wrong_shapes(named, {name: layout.shape for name, layout in layouts.items()})
    _raise_if_any(problems, "these tensors are not the parameters of this model")
    canonical: dict[str, torch.Tensor] = {}
    for name, layout in layouts.items():
        if name in named:
            canonical |= layout.split(named[name])
    return canonical


def from_canonical(config: ModelConfig, canonical: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert canonical tensors to tensors under module parameter names; the inverse of ``to_canonical``.

    Raises:
        CheckpointError: tensors missing, unexpected, or of another shape; lists all (up to 100).
    """
    check_canonical(canonical_shapes(config), canonical)
    return {name: layout.fuse(canonical) for name, layout in parameter_layouts(config).items()}


def check_layers(config: ModelConfig, found: int, source: str) -> None:
    """Check that a model with so many layers can fit the number of tensors, before listing the names of all layers.

    Args:
        config: the model.
        found: number of tensors.
        source: name of the tensors in errors.

    Raises:
        CheckpointError: the model has more than 1,000 layers and more layers than there are tensors, although each
            layer has several. Listing every missing name would take too long.
    """
    if config.layers > max(found, _MANY_LAYERS):
        reason = f"the model has {plural(config.layers, 'layer')}, but there are only {found:,} tensors"
        raise CheckpointError(f"{source} do not fit the model: {reason}.")


def check_canonical(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorHeader], source: str = "these weights"
) -> None:
    """Check that tensors have the names and shapes of the model, and data types of weights.

    Raises:
        CheckpointError: tensors missing, unexpected, of another shape or of another kind of numbers; lists all (up to
            100).
    """
    problems = [f"{name}: missing, expected {_size(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"{name}: unexpected, the model has no such tensor" for name in found if name not in expected]
    problems += _wrong_shapes(found, expected)
    problems += _wrong_dtypes({name: tensor for name, tensor in found.items() if name in expected})
    _raise_if_any(problems, f"{source} do not fit the model")


def merge_tied(config: ModelConfig, found: Mapping[str, _T], read: Callable[[str], torch.Tensor]) -> dict[str, _T]:
    """Keep one tensor for the one matrix of a model with tied embeddings, whichever of its two names files give it.

    Args:
        config: the model.
        found: anything by the name of a tensor.
        read: returns the values of a tensor.

    Raises:
        CheckpointError: both names are there, with different values.
    """
    kept = dict(found)
    if not config.tie_embeddings or HEAD not in kept:
        return kept
    head = kept.pop(HEAD)
    if EMBEDDING not in kept:
        return {EMBEDDING: head, **kept}
    if not _same_values(read(HEAD), read(EMBEDDING)):
        reason = f"differs from {EMBEDDING}, although the model ties them"
        _raise_if_any([f"{HEAD}: {reason} (tie_word_embeddings)"], "these tensors do not fit the model")
    return kept


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if first.dtype != second.dtype:
        return torch.equal(first.double(), second.double())
    # Bytes, because a NaN does not equal itself.
    return torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))


def _wrong_dtypes(found: Mapping[str, TensorHeader]) -> list[str]:
    """Describe the tensors that are not floating-point numbers of 16 bits or more, in a line per data type.

    Numbers of 8 bits have scales somewhere; without them they are other weights.
    """
    by_dtype: dict[str, list[str]] = {}
    for name, tensor in found.items():
        if tensor.dtype not in WEIGHT_DTYPES:
            by_dtype.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: of the data type {dtype}, which is "
        "not one of weights. Save the model in bfloat16 or float32 with transformers first"
        for dtype, names in by_dtype.items()
    ]


def _wrong_shapes(named: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name}: is {_size(named[name].shape)}, the model has {_size(shape)}"
        for name, shape in expected.items()
        if name in named and tuple(named[name].shape) != shape
    ]


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def _raise_if_any(problems: list[str], head: str) -> None:
    if problems:
        more = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
        listed = [f"  {problem}" for problem in [*problems[:_MAX_LISTED], *more]]
        raise CheckpointError("\n".join([f"{head}: {len(problems)} problem(s)", *listed]))
