"""Stored models, in checkpoints or in Hugging Face folders: opened, loaded, taken as initial weights, and exported.

    run ----- saves ------> checkpoint ------------------+
    import (importing/) --> checkpoint of weights only --+--open_model--> ModelSource: configuration, dtype, tokenizer,
                            Hugging Face folder ---------+                identity; load, or fill a shard of the model

    checkpoint.init_from --find_weights, rank 0--> verified folder --load_weights, all ranks--> local parameters
    checkpoint --load_model--> Decoder
               --export_hf---> Hugging Face folder

An export needs nothing but the checkpoint, which has the weights, the model section and the tokenizer's files.
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError

from hlat.checkpoint.format.filesystem import refuse_file_name
from hlat.checkpoint.inventory import is_checkpoint
from hlat.checkpoint.protocol.reader import (
    MANIFEST_NAME,
    Checkpoint,
    hash_file,
    open_checkpoint,
    open_on_all_ranks,
    resolve,
)
from hlat.checkpoint.saved_run import TOKENIZER, has_tokenizer, read_tokenizer
from hlat.checkpoint.state import MODEL, fill
from hlat.config import ModelConfig, model_problems
from hlat.data import Tokenizer, check_export, is_like_qwen2, load_tokenizer, vocabulary_texts
from hlat.model import (
    Decoder,
    LocalParameter,
    SpecialIds,
    build,
    canonical_shapes,
    check_canonical,
    check_layers,
    collect_local_parameters,
    hf_class,
    read_hf,
    read_special_ids,
    write_hf,
)
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import check_consistent
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, HubError, HubModel

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


def find_weights(path: str, config: ModelConfig) -> Path:
    """Find the folder of weights to start from, and check it, without loading them.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder, which stand for the newest checkpoint; a Hugging Face
            folder; or the id of a model of the Hub, which is downloaded once.
        config: model of the run, which the weights of a Hugging Face folder have to fit.

    Returns:
        The checkpoint, or the Hugging Face folder.

    Raises:
        CheckpointError: there is no valid checkpoint; or the files of the Hugging Face folder are missing or damaged,
            or do not fit the model.
        RecipeError: hlat does not have the architecture of the Hugging Face folder.
    """
    folder = _local_folder(path)
    if not is_hf_folder(folder):
        return resolve(folder)
    _check_hf_fits(HFModel(folder), config)
    return folder


def load_weights(
    path: str | Path,
    config: ModelConfig,
    parameters: Sequence[LocalParameter],
    ranks: HostGroup | None = None,
    expected: str | None = None,
) -> str:
    """Load weights into local parameters, converted to their dtype; bf16 to fp32 is exact. Collective.

    Args:
        path: as for ``find_weights``, which rank 0 calls.
        config: the full model.
        parameters: local parameters of this process; filled in place.
        ranks: processes that load together; None for this process alone.
        expected: identity of the weights that the run began with before; None if it did not.

    Returns:
        The identity of the weights: a hash of everything stored with them.

    Raises:
        CheckpointError: there are no valid weights, they do not fit the model, or they are not the expected ones.
        LaunchError: a rank sees other files in the Hugging Face folder than rank 0.
    """
    ranks = ranks or HostGroup()
    folder = ranks.run_on_rank0(lambda: find_weights(str(path), config))
    identity = ranks.run_on_rank0(lambda: _identify_weights(folder, expected))
    if not ranks.run_on_rank0(lambda: is_hf_folder(folder)):
        checkpoint = open_on_all_ranks(folder, ranks)
        ranks.run_on_all(lambda: fill(checkpoint, config, parameters))
        return identity
    # Other hosts have a cache of their own; rank 0 has found the model, so theirs can be filled.
    folder = ranks.run_on_all(lambda: _local_folder(str(path)))
    model = ranks.run_on_all(lambda: HFModel(folder))
    check_consistent(ranks, {f"the Hugging Face model {path}": _hf_file_sizes(folder)})
    ranks.run_on_all(lambda: _fill_from_hf(model, config, parameters))
    return identity


def _identify_weights(folder: Path, expected: str | None) -> str:
    try:
        identity = HFModel(folder).sha256() if is_hf_folder(folder) else hash_file(folder / MANIFEST_NAME)
    except OSError as error:
        raise CheckpointError(f"checkpoint.init_from {folder}: cannot be read: {error}") from error
    if expected not in (None, identity):
        raise CheckpointError(
            f"checkpoint.init_from {folder}: these are not the weights that this run began with. Restore them, or name "
            "that checkpoint itself if a newer one is found now; for a run with other weights, use another run.dir."
        )
    return identity


def _local_folder(path: str) -> Path:
    hub = HubModel.parse(path)
    if hub is None:
        return Path(path)
    try:
        return hub.snapshot((*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES))
    except HubError as error:
        raise CheckpointError(f"checkpoint.init_from {path}: {error}.") from error


def _fill_from_hf(model: HFModel, config: ModelConfig, parameters: Sequence[LocalParameter]) -> None:
    _check_hf_fits(model, config)
    for parameter in parameters:
        fill_from_tensors(parameter, model.tensors)


def _check_hf_fits(model: HFModel, config: ModelConfig) -> None:
    found = {name: model.tensors.header(name) for name in model.tensors}
    check_canonical(canonical_shapes(config), found, f"the weights in {model.path}")


def _hf_file_sizes(folder: Path) -> dict[str, int]:
    """Sizes in bytes of the files that hold the model, by name: what every host has to see alike."""
    return {file.name: file.stat().st_size for file in sorted([folder / "config.json", *folder.glob("*.safetensors")])}


def load_model(
    path: str | Path, device: torch.device | str, dtype: torch.dtype | None = None, weights: str = "model"
) -> tuple[Decoder, dict[str, Any]]:
    """Load the model of a checkpoint.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder.
        device: device of the weights.
        dtype: data type of the weights; None for the saved one (if there are several, the one they promote to).
        weights: ``model``, or ``ema`` for the average of the weights (``training.ema``).

    Returns:
        The model, and the metadata of the checkpoint.

    Raises:
        CheckpointError: there is no valid checkpoint, or it has no model, or no such weights.
    """
    checkpoint = open_checkpoint(resolve(Path(path)))
    config, prefix = model_config(checkpoint), weights_prefix(checkpoint, weights)
    model = build(config, device=device, seed=None, dtype=dtype or saved_dtype(checkpoint, prefix))
    fill(checkpoint, config, collect_local_parameters(model), prefix)
    return model, dict(checkpoint.meta)


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read the model section of a checkpoint; a missing ``max_sequence_length`` is filled in.

    Raises:
        CheckpointError: there is no model section, this version does not support it, or the weights do not fit it.
    """
    recipe = checkpoint.meta.get("recipe", {})
    fields = checkpoint.meta.get("model") or recipe.get("model")
    if not isinstance(fields, dict):  # other sections of a recipe may be lists
        raise CheckpointError(f"{checkpoint.path}: has no model section")
    if fields.get("max_sequence_length") is None:
        fields = fields | {"max_sequence_length": _sequence_length(recipe)}
    try:
        config = ModelConfig.model_validate(fields)
    except ValidationError as exc:
        raise CheckpointError(f"{checkpoint.path}: this version does not support its model section: {exc}") from exc
    if problems := model_problems(config):
        raise CheckpointError(f"{checkpoint.path}: invalid model configuration: {'; '.join(map(str, problems))}")
    _check_weights(checkpoint, config)
    return config


def _sequence_length(recipe: Mapping[str, Any]) -> Any:
    data = recipe.get("data")
    return data.get("sequence_length") if isinstance(data, dict) else None


def _check_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Check that the weights fit the model section, before memory for the model is allocated."""
    found = {name.removeprefix(MODEL): tensor for name, tensor in checkpoint.tensors.items() if name.startswith(MODEL)}
    if not found:
        raise CheckpointError(f"{checkpoint.path}: has no weights")
    check_layers(config, len(found), str(checkpoint.path))
    check_canonical(canonical_shapes(config), found, str(checkpoint.path))


def export_hf(
    path: str | Path, out_dir: str | Path, *, dtype: torch.dtype | str | None = None, weights: str = "model"
) -> Path:
    """Write the model of a checkpoint, with its tokenizer, to a folder that transformers can load.

    Tensors are read one after another; at most one shard of the export is in memory.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder.
        out_dir: folder to be written.
        dtype: data type of the files, as torch.bfloat16 or "bfloat16"; None for the saved one.
        weights: ``model``, or ``ema`` for the average of the weights (``training.ema``).

    Returns:
        The folder.

    Raises:
        CheckpointError: there is no valid checkpoint, or no such weights, or the folder exists and is not empty, or
            has the name of a file.
        DataError: the tokenizer of the checkpoint cannot be exported.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    refuse_file_name(Path(out_dir), "an export is a folder in the format of Hugging Face")
    checkpoint = open_checkpoint(resolve(Path(path)))
    config, prefix = model_config(checkpoint), weights_prefix(checkpoint, weights)
    special, generation = _special_ids(checkpoint)
    with _exported_tokenizer(checkpoint) as tokenizer:
        return write_hf(
            out_dir,
            config,
            _canonical(checkpoint, config, prefix),
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
            tokenizer_dir=tokenizer if tokenizer.is_dir() else None,
            eos_id=special.eos,
            bos_id=special.bos,
            pad_id=special.pad,
            generation=generation,
            family=_family(config, tokenizer / "tokenizer.json") if "recipe" in checkpoint.meta else None,
        )


@contextmanager
def _exported_tokenizer(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield the folder of the tokenizer's files: as imported, or as this version saves it for the ids of training.

    Earlier versions stored files with which transformers gives other ids, such as a SentencePiece model alone.
    """
    if "recipe" not in checkpoint.meta or not has_tokenizer(checkpoint.path):
        yield checkpoint.path / TOKENIZER
        return
    with TemporaryDirectory(prefix="hlat-tokenizer-") as folder:
        tokenizer = read_tokenizer(checkpoint.path)
        check_export(tokenizer, vocabulary_texts(tokenizer))
        tokenizer.save(Path(folder))
        yield Path(folder)


def _family(config: ModelConfig, tokenizer: Path) -> str | None:
    """Return llama, with biases, for a model of Qwen2 with a tokenizer that transformers would change for that type."""
    if hf_class(config).model_type != "qwen2" or not tokenizer.is_file() or is_like_qwen2(tokenizer.read_bytes()):
        return None
    return "llama"


def weights_prefix(checkpoint: Checkpoint, weights: str) -> str:
    """Return the prefix of the names of the weights: of ``model``, or of ``ema`` for their average.

    Raises:
        CheckpointError: the checkpoint has none of that name.
    """
    if not any(name.startswith(f"{weights}.") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path}: has no {weights} weights. A run keeps an average of its weights (ema) if its "
            "recipe has training.ema; the weights themselves are called model."
        )
    return f"{weights}."


def _canonical(checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name in canonical_shapes(config):
        yield name, checkpoint.read([prefix + name])[prefix + name]


def saved_dtype(checkpoint: Checkpoint, prefix: str) -> torch.dtype:
    """Return the data type of the saved weights; if there are several, the one they promote to."""
    dtypes = [tensor.dtype for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)]
    return functools.reduce(torch.promote_types, dtypes)


def end_token_ids(checkpoint: Checkpoint) -> set[int]:
    """Token ids that end a text: from generation_config.json for an imported model, else from the tokenizer."""
    _, generation = _special_ids(checkpoint)
    ends = generation.eos
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


def _special_ids(checkpoint: Checkpoint) -> tuple[SpecialIds, SpecialIds]:
    """Special token ids of the model and for generation: those imported with the model, else the tokenizer's."""
    meta = checkpoint.meta
    if "special_ids" in meta:
        return _saved_ids(checkpoint, "special_ids"), _saved_ids(checkpoint, "generation_ids")
    if not has_tokenizer(checkpoint.path):
        return SpecialIds(), SpecialIds()
    tokenizer = read_tokenizer(checkpoint.path)
    found = SpecialIds(bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    return found, found


def _saved_ids(checkpoint: Checkpoint, key: str) -> SpecialIds:
    try:
        return SpecialIds(**checkpoint.meta[key])
    except (TypeError, KeyError) as exc:
        raise CheckpointError(f"{checkpoint.path}: {key} in its meta.json is invalid") from exc
