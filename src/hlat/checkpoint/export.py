"""Models loaded from checkpoints, and exported to Hugging Face folders.

    import (importing/) --> checkpoint of weights only ---+
    run ----- saves ------> checkpoint -------------------+--> load_model, export_hf --> Hugging Face folder

An export needs nothing but the checkpoint, which has the weights, the model section and the tokenizer's files.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError

from hlat.checkpoint.format.filesystem import refuse_file_name
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint, resolve
from hlat.checkpoint.state import MODEL, fill
from hlat.checkpoint.tokenizer import TOKENIZER, has_tokenizer, read_tokenizer
from hlat.config import ModelConfig, model_problems
from hlat.data import check_export, is_like_qwen2, vocabulary_texts
from hlat.model import (
    Decoder,
    SpecialIds,
    build,
    canonical_shapes,
    check_canonical,
    check_layers,
    collect_local_parameters,
    hf_class,
    write_hf,
)
from hlat.runtime.errors import CheckpointError


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
