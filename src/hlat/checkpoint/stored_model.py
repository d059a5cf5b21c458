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
from collections.abc import Iterator, Sequence
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
from hlat.checkpoint.state import MODEL, copy_rows, fill
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

# Files: hashing is bound by the processor, and takes it 0.9 to 2 s per GB.
_HASHED_TOGETHER = 8


class ModelSource(ABC):
    """A stored model: a folder with the complete configuration and the weights."""

    path: Path
    config: ModelConfig
    dtype: torch.dtype  # of the stored weights; if there are several, the one they promote to

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text; DataError if they are the tokenizer's, and it is unreadable."""

    @abstractmethod
    def fill(self, parameters: Sequence[LocalParameter]) -> None:
        """Load the weights into the parameters of this process, converted to their dtype."""

    def load(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Decoder:
        """Build the complete model on a device and load its weights; ``dtype`` None is the stored one."""
        # No seed: all weights are overwritten.
        model = build(self.config, device=device, seed=None, dtype=dtype or self.dtype)
        self.fill(collect_local_parameters(model))
        return model

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Load its tokenizer; CheckpointError if it has none, DataError if it is unreadable."""

    @abstractmethod
    def sha256(self) -> str:
        """Compute the identity of the weights: a hash of everything stored with them, in hexadecimal."""


class CheckpointModel(ModelSource):
    """The model of a verified checkpoint of hlat; ``weights`` is ``model``, or ``ema`` for their average."""

    def __init__(self, folder: Path, weights: str) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(folder)
        self.path, self.config = folder, model_config(self.checkpoint)
        self.prefix = weights_prefix(self.checkpoint, weights)
        dtypes = [tensor.dtype for name, tensor in self.checkpoint.tensors.items() if name.startswith(self.prefix)]
        self.dtype = functools.reduce(torch.promote_types, dtypes)

    @property
    def end_ids(self) -> frozenset[int]:
        return end_token_ids(self.checkpoint)

    def fill(self, parameters: Sequence[LocalParameter]) -> None:
        fill(self.checkpoint, self.config, parameters, self.prefix)

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.path, eos_token=None)

    def sha256(self) -> str:
        # The manifest has the hash of every file, so no tensor is read again.
        manifest = (self.path / MANIFEST_NAME).read_bytes()
        return hashlib.sha256(manifest + self.prefix.encode()).hexdigest()


class HFModel(ModelSource):
    """The model of a Hugging Face folder, with config.json and safetensors files."""

    def __init__(self, folder: Path) -> None:
        fields, self.tensors = read_hf(folder)  # weights by canonical name, read one at a time
        self.path, self.config = folder, ModelConfig.model_validate(fields)
        self.dtype = self.tensors.dtype
        self.files = sorted([folder / "config.json", *folder.glob("*.safetensors")])

    @property
    def end_ids(self) -> frozenset[int]:
        # The ids of generation_config.json, as for an imported checkpoint.
        return _all_of(read_special_ids(self.path)[1].eos)

    def fill(self, parameters: Sequence[LocalParameter]) -> None:
        # The local rows and columns of each, from complete canonical tensors.
        for parameter in parameters:
            first, columns = parameter.layout.first_column, parameter.layout.columns
            for block in parameter.row_blocks():
                source = self.tensors[block.name].narrow(0, block.canonical_start, block.rows)
                if columns:
                    source = source.narrow(1, first, columns[0])
                copy_rows(parameter.row_views(block, parameter.tensor), source)

    def tokenizer(self) -> Tokenizer:
        if not any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise CheckpointError(f"{self.path}: has neither tokenizer.json nor tokenizer.model. Add one of them.")
        return load_tokenizer(self.path, eos_token=None)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        with ThreadPoolExecutor(_HASHED_TOGETHER) as pool:
            for file, found in zip(self.files, pool.map(hash_file, self.files), strict=True):
                digest.update(f"{file.name} {found}\n".encode())
        return digest.hexdigest()


def is_hf_folder(folder: Path) -> bool:
    """True if a folder has a config.json and is neither a checkpoint nor the folder of a run."""
    return (folder / "config.json").is_file() and not is_checkpoint(folder) and not (folder / "checkpoints").is_dir()


def open_model(path: str | Path, weights: str = "model", *, verify: bool = True) -> ModelSource:
    """Find the model that a path refers to: a checkpoint, which is verified, or a Hugging Face folder.

    ``weights`` is ``model``, or ``ema`` for their average. ``verify=False`` is for the folder of a checkpoint that
    another process has just verified. CheckpointError if there is none; RecipeError for another architecture.
    """
    folder = Path(path)
    if is_hf_folder(folder):
        if weights != "model":
            raise CheckpointError(f"{folder}: a Hugging Face folder has one set of weights, not weights={weights!r}.")
        return HFModel(folder)
    return CheckpointModel(resolve(folder) if verify else folder, weights)


def find_weights(path: str, config: ModelConfig) -> Path:
    """Find the folder of weights to start from, and check it, without loading them.

    ``path`` is as for ``open_model``, or a model's id on the Hub, which is downloaded once. CheckpointError if files
    are missing, damaged or do not fit ``config``; RecipeError for another architecture.
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
    """Load weights into local parameters, in place, converted to their dtype; bf16 to fp32 is exact. Collective.

    ``path`` is as for ``find_weights``. ``expected`` is the identity of the weights that the run began with before, or
    None. Returns the identity of the weights: a hash of everything stored with them.

    Raises:
        CheckpointError: there are no valid weights, they do not fit the model, or they are not the expected ones.
        LaunchError: a rank sees other files in the Hugging Face folder than rank 0.
    """
    ranks = ranks or HostGroup()
    folder = ranks.run_on_rank0(lambda: find_weights(str(path), config))
    # Before anything is loaded: a resumed run must not go on from other weights.
    identity = ranks.run_on_rank0(lambda: _identify_weights(folder, expected))
    if not ranks.run_on_rank0(lambda: is_hf_folder(folder)):
        checkpoint = open_on_all_ranks(folder, ranks)
        ranks.run_on_all(lambda: fill(checkpoint, config, parameters))
        return identity
    # Other hosts have a cache of their own; rank 0 has found the model, so theirs can be filled.
    folder = ranks.run_on_all(lambda: _local_folder(str(path)))
    model = ranks.run_on_all(lambda: HFModel(folder))
    # Sizes only: a hash on every host would take 0.9 to 2 s per GB.
    check_consistent(
        ranks, {f"the Hugging Face model {path}": {file.name: file.stat().st_size for file in model.files}}
    )
    ranks.run_on_all(lambda: _check_hf_fits(model, config))
    ranks.run_on_all(lambda: model.fill(parameters))
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


def _check_hf_fits(model: HFModel, config: ModelConfig) -> None:
    found = {name: model.tensors.header(name) for name in model.tensors}
    check_canonical(canonical_shapes(config), found, f"the weights in {model.path}")


def load_model(
    path: str | Path, device: torch.device | str, dtype: torch.dtype | None = None, weights: str = "model"
) -> tuple[Decoder, dict[str, Any]]:
    """Load the model of a checkpoint, and return it with the checkpoint's metadata.

    ``dtype`` None is the saved one; if there are several, the one they promote to. CheckpointError if there is no valid
    checkpoint, no model in it, or no such ``weights`` (``model``, or ``ema`` for their average).
    """
    source = CheckpointModel(resolve(Path(path)), weights)
    return source.load(device, dtype), dict(source.checkpoint.meta)


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read and check the model section of a checkpoint; CheckpointError if the weights do not fit it."""
    recipe = checkpoint.meta.get("recipe", {})
    fields = checkpoint.meta.get("model") or recipe.get("model")
    if not isinstance(fields, dict):  # other sections of a recipe may be lists
        raise CheckpointError(f"{checkpoint.path}: has no model section")
    # A recipe may leave it to the data, whose sequence length the model was trained with.
    if fields.get("max_sequence_length") is None:
        data = recipe.get("data")
        fields = fields | {"max_sequence_length": data.get("sequence_length") if isinstance(data, dict) else None}
    try:
        config = ModelConfig.model_validate(fields)
    except ValidationError as exc:
        raise CheckpointError(f"{checkpoint.path}: this version does not support its model section: {exc}") from exc
    if problems := model_problems(config):
        raise CheckpointError(f"{checkpoint.path}: invalid model configuration: {'; '.join(map(str, problems))}")
    _check_weights(checkpoint, config)
    return config


def _check_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    found = {name.removeprefix(MODEL): tensor for name, tensor in checkpoint.tensors.items() if name.startswith(MODEL)}
    if not found:
        raise CheckpointError(f"{checkpoint.path}: has no weights")
    # Before memory for the model is allocated, and before the names of all layers are listed.
    check_layers(config, len(found), str(checkpoint.path))
    check_canonical(canonical_shapes(config), found, str(checkpoint.path))


def export_hf(
    path: str | Path, out_dir: str | Path, *, dtype: torch.dtype | str | None = None, weights: str = "model"
) -> Path:
    """Write the model of a checkpoint, with its tokenizer, to a folder that transformers can load, and return it.

    Tensors are read one after another; at most one shard of the export is in memory.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder.
        out_dir: folder to be written.
        dtype: data type of the files, as torch.bfloat16 or "bfloat16"; None for the saved one.
        weights: ``model``, or ``ema`` for the average of the weights (``training.ema``).

    Raises:
        CheckpointError: no valid checkpoint, no such weights, or the folder is not empty or has the name of a file.
        DataError: the tokenizer of the checkpoint cannot be exported.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    refuse_file_name(Path(out_dir), "an export is a folder in the format of Hugging Face")
    source = CheckpointModel(resolve(Path(path)), weights)
    config, checkpoint = source.config, source.checkpoint
    special, generation = _special_ids(checkpoint)
    names = ((name, source.prefix + name) for name in canonical_shapes(config))
    with _exported_tokenizer(checkpoint) as tokenizer:
        return write_hf(
            out_dir,
            config,
            ((name, checkpoint.read([stored])[stored]) for name, stored in names),
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
    """Yield the folder of the tokenizer's files: as imported, or as this version saves it for the ids of training."""
    # Without a recipe the model was imported, and its files are those that came with it.
    if "recipe" not in checkpoint.meta or not has_tokenizer(checkpoint.path):
        yield checkpoint.path / TOKENIZER
        return
    with TemporaryDirectory(prefix="hlat-tokenizer-") as folder:
        # Saved anew: earlier versions stored files with which transformers gives other ids, such as a SentencePiece
        # model alone.
        tokenizer = read_tokenizer(checkpoint.path)
        check_export(tokenizer, vocabulary_texts(tokenizer))
        tokenizer.save(Path(folder))
        yield Path(folder)


def _family(config: ModelConfig, tokenizer: Path) -> str | None:
    # For type qwen2 alone, transformers 5 makes a tokenizer of Qwen2 of any tokenizer's vocabulary. A LLaMA with biases
    # is the same model.
    if hf_class(config).model_type != "qwen2" or not tokenizer.is_file() or is_like_qwen2(tokenizer.read_bytes()):
        return None
    return "llama"


def weights_prefix(checkpoint: Checkpoint, weights: str) -> str:
    """Return the prefix of the names of ``model`` or ``ema`` weights; CheckpointError if the checkpoint has none."""
    if not any(name.startswith(f"{weights}.") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path}: has no {weights} weights. A run keeps an average of its weights (ema) if its "
            "recipe has training.ema; the weights themselves are called model."
        )
    return f"{weights}."


def end_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Token ids that end a text: from generation_config.json for an imported model, else from the tokenizer."""
    return _all_of(_special_ids(checkpoint)[1].eos)


def _all_of(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _special_ids(checkpoint: Checkpoint) -> tuple[SpecialIds, SpecialIds]:
    """Special token ids of the model, and for generation: those imported with it, else the tokenizer's."""
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
