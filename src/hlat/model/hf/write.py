"""Write a model as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` can load.

    canonical tensors -> cast -> shards of at most max_shard_bytes -> + index, config, generation config, tokenizer
                      -> temporary folder -> renamed

Memory in addition to the caller's tensors: at most one shard.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hlat.config import ModelConfig
from hlat.model.hf.config import SpecialIds, TokenIds, config_json, hf_class
from hlat.model.hf.files import INDEX, TOKENIZER_FILES, WEIGHTS, atomic_folder, read_json, shard_name, write_json
from hlat.model.hf.names import canonical_shapes, check_canonical
from hlat.runtime.errors import CheckpointError, StorageError

Named = tuple[str, torch.Tensor]


def write_hf(
    out_dir: str | Path,
    config: ModelConfig,
    canonical: Mapping[str, torch.Tensor] | Iterable[Named],
    *,
    dtype: torch.dtype | None = None,
    tokenizer_dir: str | Path | None = None,
    eos_id: TokenIds = None,
    bos_id: TokenIds = None,
    pad_id: TokenIds = None,
    generation: SpecialIds | None = None,
    family: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a model as a Hugging Face folder.

    Args:
        out_dir: the folder to create; an existing one must be empty.
        config: the model; needs ``max_sequence_length``.
        canonical: its tensors by canonical name, or an iterable of (name, tensor) pairs.
        dtype: dtype of the files; None keeps the dtype of each tensor.
        tokenizer_dir: folder to copy the tokenizer files from.
        eos_id: end-of-text token for config.json, or several.
        bos_id: beginning-of-text token for config.json.
        pad_id: padding token for config.json.
        generation: special tokens for generation_config.json; None for the same.
        family: architecture to write it as, which computes the same; None for its own.
        max_shard_bytes: maximum size of a safetensors file, unless a single tensor is larger.

    Returns:
        The folder.

    Raises:
        RecipeError: config.json cannot express the model.
        CheckpointError: tensors missing, unexpected or of another shape; a value that the dtype cannot hold; the folder
            exists; no tokenizer files.
        StorageError: the folder cannot be written; nothing is left behind.
    """
    target = Path(out_dir)
    pairs = canonical.items() if isinstance(canonical, Mapping) else canonical
    with atomic_folder(target) as folder:
        if tokenizer_dir is not None:
            _copy_tokenizer(Path(tokenizer_dir), folder, eos_id, bos_id)
        config_json(config, torch.float32, eos_id, bos_id, pad_id)  # raises before anything large is written
        has_bias = hf_class(config, family).zero_output_bias
        named = _cast(_with_zero_biases(config, pairs) if has_bias else pairs, dtype)
        stored = _write_weights(folder, config, named, has_bias, max_shard_bytes)
        write_json(folder / "config.json", config_json(config, stored, eos_id, bos_id, pad_id, family))
        generation = generation or SpecialIds(bos_id, eos_id, pad_id)
        write_json(folder / "generation_config.json", generation.as_json)
    return target


def _cast(pairs: Iterable[Named], dtype: torch.dtype | None) -> Iterator[Named]:
    for name, tensor in pairs:
        cast = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        # float16 ends at 65,504, so that weights of bfloat16 may become infinite.
        if cast.dtype != tensor.dtype and not cast.isfinite().all() and tensor.isfinite().all():
            largest = tensor.detach().abs().max().item()
            reason = f"{name}: has {largest:.4g}, and {cast.dtype} ends at {torch.finfo(cast.dtype).max:.4g}"
            raise CheckpointError(f"{reason}. Export it in bfloat16 or float32.")
        yield name, cast


def _with_zero_biases(config: ModelConfig, pairs: Iterable[Named]) -> Iterator[Named]:
    """Add the output biases that the target class has and hlat's models do not, as zeros."""
    for name, tensor in pairs:
        yield name, tensor
        if name.endswith("o_proj.weight"):
            yield name.removesuffix("weight") + "bias", torch.zeros(config.hidden_size, dtype=tensor.dtype)


def _write_weights(
    folder: Path, config: ModelConfig, pairs: Iterable[Named], has_bias: bool, max_shard_bytes: int
) -> torch.dtype:
    """Write shards and index; return the dtype of the embedding, for config.json."""
    expected = canonical_shapes(config)
    if has_bias:
        weights = [name for name in expected if name.endswith("o_proj.weight")]
        expected |= {name.removesuffix("weight") + "bias": (config.hidden_size,) for name in weights}
    written: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    total, dtype = 0, torch.float32
    for number, shard in enumerate(_shards(pairs, max_shard_bytes), start=1):
        _save(folder / f"{number}.shard", shard)
        shards.append(list(shard))
        written |= {name: tensor.to("meta") for name, tensor in shard.items()}
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = shard.get("model.embed_tokens.weight", torch.empty(0, dtype=dtype)).dtype
    check_canonical(expected, written, "the tensors to export")
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)] if len(shards) > 1 else [WEIGHTS]
    for number, name in enumerate(names, start=1):
        (folder / f"{number}.shard").rename(folder / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return dtype


def _shards(pairs: Iterable[Named], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in pairs:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _save(path: Path, shard: dict[str, torch.Tensor]) -> None:
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:  # raised for an error of the disk
        raise StorageError(
            f"{path.parent}: cannot be written: {error}. Free some space, or name another folder."
        ) from error


def _copy_tokenizer(source: Path, folder: Path, eos_id: TokenIds, bos_id: TokenIds) -> None:
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not files:
        raise CheckpointError(f"{source}: no tokenizer files ({', '.join(TOKENIZER_FILES[:2])}, ...).")
    for file in files:
        shutil.copyfile(file, folder / file.name)
    names = {file.name for file in files}
    if "tokenizer.json" in names and "tokenizer_config.json" not in names:
        write_json(folder / "tokenizer_config.json", _tokenizer_config(source / "tokenizer.json", eos_id, bos_id))


def _tokenizer_config(file: Path, eos_id: TokenIds, bos_id: TokenIds) -> dict[str, Any]:
    """Build a tokenizer_config.json, without which transformers would use the tokenizer class of the model family."""
    content = read_json(file)
    tokens = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
    special = {"bos_token": tokens.get(_first(bos_id)), "eos_token": tokens.get(_first(eos_id))}
    known = {name: token for name, token in special.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}


def _first(ids: TokenIds) -> int | None:
    """Return the first of several end-of-text ids, which is the pre-trained model's."""
    return ids[0] if isinstance(ids, list) else ids
