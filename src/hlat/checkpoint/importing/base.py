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
    """A canonical tensor of a source.

    Attributes:
        header: its shape and data type (meta device).
        read: returns its values on the CPU.
    """

    header: torch.Tensor
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class SourceModel:
    """A model that was found in a folder; its tensors have the names and shapes of the model section.

    Attributes:
        config: model section.
        tensors: the weights by canonical name.
        files: file name -> path of the tokenizer's files.
        special: special token ids of the model; None if the source does not say, so that the tokenizer's are used.
        generation: special token ids for generation.
    """

    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    files: Mapping[str, Path] = field(default_factory=dict)
    special: SpecialIds | None = None
    generation: SpecialIds | None = None


class SourceFormat(ABC):
    """A format of weights that ``hlat import`` reads. Nothing in its files may be executed.

    Attributes:
        name: name of the format, for messages.
        signs: files by which a folder of this format is recognised, for messages.
    """

    name: str
    signs: str

    @abstractmethod
    def recognises(self, folder: Path) -> bool:
        """True if a folder looks like one of this format; no file is read."""

    @abstractmethod
    def open(self, folder: Path, config: ModelConfig | None) -> SourceModel:
        """Find the tensors of a folder, without reading their values.

        Args:
            folder: the folder.
            config: model section; None if the user gave none.

        Raises:
            RecipeError: hlat does not support the model.
            CheckpointError: files or tensors are missing, damaged, unexpected or of another shape; lists all. Or the
                format does not describe its model, and the user gave none.
        """


def required_model(config: ModelConfig | None, folder: Path, name: str) -> ModelConfig:
    """Return the model section that the user gave.

    Raises:
        CheckpointError: the user gave none.
    """
    if config is None:
        raise CheckpointError(
            f"{folder}: {name} do not say which model they are of. Give --model: a preset, such as llama-2-7b, or the "
            "model's config.json."
        )
    return config


def checked(config: ModelConfig, tensors: Mapping[str, SourceTensor], folder: Path) -> dict[str, SourceTensor]:
    """Return the tensors in order of execution, after comparing their names, shapes and data types with the model's.

    Raises:
        CheckpointError: tensors missing, unexpected, or of another shape or kind of numbers; lists all. Or tied
            embeddings that differ.
    """
    expected = canonical_shapes_of(config, len(tensors), folder)
    tensors = merge_tied(config, tensors, lambda name: tensors[name].read())
    check_canonical(expected, {name: tensor.header for name, tensor in tensors.items()}, str(folder))
    return {name: tensors[name] for name in expected}


def canonical_shapes_of(config: ModelConfig, found: int, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the model's tensors, after checking that so many found tensors can be those."""
    check_layers(config, found, str(folder))
    return canonical_shapes(config)
