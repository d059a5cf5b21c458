"""A stored model, in a checkpoint of hlat or in a Hugging Face folder: configuration, weights, tokenizer, identity.

folder --open_model--> ModelSource --fill--> the parameters of a process: a complete model, or a shard of it
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hlat.checkpoint.export import end_token_ids, model_config, saved_dtype, weights_prefix
from hlat.checkpoint.inventory import is_checkpoint
from hlat.checkpoint.protocol.manifest import MANIFEST_NAME, hash_file
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint, resolve
from hlat.checkpoint.state import fill
from hlat.checkpoint.tokenizer import read_tokenizer
from hlat.config import ModelConfig
from hlat.data import Tokenizer, load_tokenizer
from hlat.model import Decoder, LocalParameter, build, collect_local_parameters, read_hf, read_special_ids
from hlat.runtime.errors import CheckpointError

_HASHED_TOGETHER = 8  # files; 0.9 to 2 s per GB and processor


class ModelSource(ABC):
    """A stored model.

    Attributes:
        path: its folder.
        config: the complete model.
        dtype: dtype of the stored weights; if there are several, the one they promote to.
    """

    path: Path
    config: ModelConfig
    dtype: torch.dtype

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text.

        Raises:
            DataError: they are the tokenizer's, and it is unreadable.
        """

    @abstractmethod
    def fill(self, parameters: Sequence[LocalParameter]) -> None:
        """Load the weights into the parameters of this process, converted to their dtype."""

    def load(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Decoder:
        """Build the complete model and load its weights; the dtype is the stored one if None."""
        model = build(self.config, device=device, seed=None, dtype=dtype or self.dtype)
        self.fill(collect_local_parameters(model))
        return model

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Load its tokenizer.

        Raises:
            CheckpointError: it has none.
            DataError: the tokenizer is unreadable.
        """

    @abstractmethod
    def sha256(self) -> str:
        """Compute the identity of the weights: a hash of everything stored with them."""


class CheckpointModel(ModelSource):
    """The model of a checkpoint of hlat.

    Args:
        folder: the checkpoint, verified.
        weights: ``model``, or ``ema`` for the average of the weights.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        self._checkpoint: Checkpoint = open_checkpoint(folder)
        self._prefix = weights_prefix(self._checkpoint, weights)
        self.path, self.config = folder, model_config(self._checkpoint)
        self.dtype = saved_dtype(self._checkpoint, self._prefix)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text; see ``ModelSource.end_ids``."""
        return frozenset(end_token_ids(self._checkpoint))

    def fill(self, parameters: Sequence[LocalParameter]) -> None:
        """Load the weights; see ``ModelSource.fill``."""
        fill(self._checkpoint, self.config, parameters, self._prefix)

    def tokenizer(self) -> Tokenizer:
        """Load its tokenizer; see ``ModelSource.tokenizer``."""
        return read_tokenizer(self.path, eos_token=None)

    def sha256(self) -> str:
        """Compute the identity of the weights; the manifest has the hash of every file."""
        manifest = (self.path / MANIFEST_NAME).read_bytes()
        return hashlib.sha256(manifest + self._prefix.encode()).hexdigest()


class HFModel(ModelSource):
    """The model of a Hugging Face folder.

    Args:
        folder: folder with config.json and safetensors files.

    Attributes:
        tensors: the weights by canonical name, read one at a time.
    """

    def __init__(self, folder: Path) -> None:
        fields, self.tensors = read_hf(folder)
        self.path, self.config = folder, ModelConfig.model_validate(fields)
        self.dtype = self.tensors.dtype

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text; see ``ModelSource.end_ids``."""
        ends = read_special_ids(self.path)[1].eos
        return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def fill(self, parameters: Sequence[LocalParameter]) -> None:
        """Load the weights; see ``ModelSource.fill``."""
        for parameter in parameters:
            fill_from_tensors(parameter, self.tensors)

    def tokenizer(self) -> Tokenizer:
        """Load its tokenizer; see ``ModelSource.tokenizer``."""
        if not any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise CheckpointError(f"{self.path}: has neither tokenizer.json nor tokenizer.model. Add one of them.")
        return load_tokenizer(self.path, eos_token=None)

    def sha256(self) -> str:
        """Compute the identity of the weights; every weight file is read once."""
        digest = hashlib.sha256()
        files = sorted([self.path / "config.json", *self.path.glob("*.safetensors")])
        with ThreadPoolExecutor(_HASHED_TOGETHER) as pool:
            for file, found in zip(files, pool.map(hash_file, files), strict=True):
                digest.update(f"{file.name} {found}\n".encode())
        return digest.hexdigest()


def is_hf_folder(folder: Path) -> bool:
    """True if a folder has a config.json and is neither a checkpoint nor the folder of a run."""
    return (folder / "config.json").is_file() and not is_checkpoint(folder) and not (folder / "checkpoints").is_dir()


def fill_from_tensors(parameter: LocalParameter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the local rows and columns of a parameter from complete canonical tensors."""
    first, columns = parameter.layout.first_column, parameter.layout.columns
    for block in parameter.row_blocks():
        source = tensors[block.name].narrow(0, block.canonical_start, block.rows)
        if columns:
            source = source.narrow(1, first, columns[0])
        views = parameter.row_views(block, parameter.tensor)
        for target, rows in zip(views, source.split([view.shape[0] for view in views]), strict=True):
            target.copy_(rows)


def open_model(path: str | Path, weights: str = "model", *, verify: bool = True) -> ModelSource:
    """Find the model that a path refers to; a checkpoint is verified.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder; or a Hugging Face folder, such as an export.
        weights: ``model``, or ``ema`` for the average of the weights of a run that keeps one.
        verify: False for the folder of a checkpoint that another process has just verified.

    Raises:
        CheckpointError: there is no valid checkpoint, it has no such weights, or files are missing or damaged.
        RecipeError: hlat does not have the architecture of the Hugging Face folder.
    """
    folder = Path(path)
    if is_hf_folder(folder):
        if weights != "model":
            raise CheckpointError(f"{folder}: a Hugging Face folder has one set of weights, not weights={weights!r}.")
        return HFModel(folder)
    return CheckpointModel(resolve(folder) if verify else folder, weights)
