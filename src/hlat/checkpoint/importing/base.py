"""The protocol of a source format: weights of other programs, as canonical tensors that are read one at a time.

folder --SourceFormat.recognises--> True --open--> SourceModel: model section, tensors by canonical name, tokenizer
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hlat.config import ModelConfig
from hlat.model import SpecialIds, canonical_shapes, check_canonical, check_layers, merge_tied
from hlat.runtime.errors import CheckpointError


@dataclass(frozen=True)
class SourceTensor:
    """A canonical tensor of a source: shape and dtype now, values when they are read."""

    header: torch.Tensor  # its shape and data type (meta device)
    read: Callable[[], torch.Tensor]  # returns its values on the CPU


@dataclass(frozen=True)
class SourceModel:
    """A model that was found in a folder; its tensors have the names and shapes of the model section."""

    config: ModelConfig
    tensors: Mapping[str, SourceTensor]  # by canonical name
    # File name -> path of the tokenizer's files.
    files: Mapping[str, Path] = field(default_factory=dict)
    special: SpecialIds | None = None  # ids of the model; None if the source does not say: then those of the tokenizer
    generation: SpecialIds | None = None  # special token ids for generation


class SourceFormat(ABC):
    """A format of weights that ``hlat import`` reads. Nothing in its files may be executed."""

    name: str  # for messages
    signs: str  # files by which a folder of this format is recognised, for messages

    @abstractmethod
    def recognises(self, folder: Path) -> bool:
        """True if a folder looks like one of this format; no file is read."""

    @abstractmethod
    def open(self, folder: Path, config: ModelConfig | None) -> SourceModel:
        """Find the tensors of a folder, without reading their values; ``config`` is None if the user gave no model.

        Raises:
            RecipeError: hlat does not support the model.
            CheckpointError: files or tensors are missing, damaged, unexpected or of another shape; lists all. Or the
                format does not describe its model, and the user gave none.
        """


def required_model(config: ModelConfig | None, folder: Path, name: str) -> ModelConfig:
    """Return the model section that the user gave; CheckpointError if none was given."""
    if config is None:
        raise CheckpointError(
            f"{folder}: {name} do not say which model they are of. Give --model: a preset, such as llama-2-7b, or the "
            "model's config.json."
        )
    return config


def checked(config: ModelConfig, tensors: Mapping[str, SourceTensor], folder: Path) -> dict[str, SourceTensor]:
    """Return the tensors in order of execution; CheckpointError lists those that do not fit the model."""
    expected = canonical_shapes_of(config, len(tensors), folder)
    # Tied embeddings may be stored twice: both have to be equal, and one is kept.
    tensors = merge_tied(config, tensors, lambda name: tensors[name].read())
    check_canonical(expected, {name: tensor.header for name, tensor in tensors.items()}, str(folder))
    return {name: tensors[name] for name in expected}


def canonical_shapes_of(config: ModelConfig, found: int, folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of the model's tensors; CheckpointError if it has too many layers for those found."""
    check_layers(config, found, str(folder))
    return canonical_shapes(config)
