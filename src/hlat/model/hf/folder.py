"""Hugging Face model folders: read one, and write one that ``AutoModelForCausalLM.from_pretrained`` can load.

    config.json -> hf_to_model -> fields -> expected names and shapes
    model.safetensors, or else the index and its shards -> headers -> all differences at once
        -> ``packing.sources`` -> canonical tensors, read on access

    canonical tensors -> cast -> ``packing.pack`` -> shards of at most max_shard_bytes
                      -> + index, config, generation config, tokenizer -> temporary folder -> renamed

Only safetensors files are read: a ``.bin`` file is a pickle, and loading a pickle can run code. Writing takes memory of
at most one shard in addition to the caller's tensors.
"""

import errno
import functools
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hlat.config import ModelConfig, RecipeError, hf_to_model, model_problems
from hlat.model.hf.config import SpecialIds, TokenIds, config_json, hf_class
from hlat.model.hf.packing import Named, pack, packed_shapes, packed_tensors, sources
from hlat.model.parameter_layout import canonical_shapes, check_canonical, check_layers, merge_tied
from hlat.runtime.errors import CheckpointError, StorageError
from hlat.runtime.storage.local_files import broken_link, read_small_file, recognize_file, sync_to_disk
from hlat.runtime.terminal import plural

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FETCH = "Fetch the model again; a copy of a folder in the Hub's cache needs the files that its links name."
_LARGEST_JSON = 1 << 28  # bytes; the index of a large model has megabytes
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def shard_name(number: int, count: int) -> str:
    """Return the file name of shard ``number`` (from 1) of ``count``, as transformers names it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_json(path: Path, content: Any) -> None:
    """Write JSON as transformers does: indented, keys in the given order, newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise CheckpointError if it is missing, unreadable, or no object."""
    try:
        content = json.loads(read_small_file(path, _LARGEST_JSON))
    except FileNotFoundError:
        if link := broken_link(path):
            raise CheckpointError(f"{path}: {link}. {_FETCH}") from None
        raise CheckpointError(f"{path}: no such file. Name a folder that contains a Hugging Face model.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object.")
    return content


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``target``; rename it to ``target`` after the block has ended without an error.

    Raises:
        CheckpointError: the target exists and is not an empty folder.
        StorageError: the folder cannot be written; nothing is left behind.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already exists and is not empty. Name a new folder.")
    # In the same folder, hence on the same file system: across two of them rename fails.
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        # Contents before the name: after a power cut the target is complete or not there.
        for file in [*temporary.iterdir(), temporary]:
            sync_to_disk(file)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
        # The rename itself is in the parent folder.
        sync_to_disk(target.parent)
    except OSError as error:
        remedy = (
            "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check the disk and its permissions"
        )
        reason = error.strerror or str(error)
        raise StorageError(f"{target}: cannot be written: {reason}. {remedy}, or name another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_ADAPTER = "adapter_config.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FileTensor(NamedTuple):
    """A tensor in a safetensors file, as the header of the file describes it, or a part of one."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # the file's word for it, if weights do not have this type
    take: Callable[[torch.Tensor], torch.Tensor] | None = None  # out of the tensor of the file; None for all of it

    def read(self) -> torch.Tensor:
        with _open(self.file) as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor if self.take is None else self.take(tensor)


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors in safetensors files by canonical name, each read on access, in order of execution."""

    def __init__(self, found: Mapping[str, FileTensor]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._found[name].read()

    def header(self, name: str) -> torch.Tensor:
        """Shape and dtype of a tensor, as one without values on the meta device."""
        dtype = self._found[name].dtype
        assert isinstance(dtype, torch.dtype), "read_hf refuses other types"
        return torch.empty(self._found[name].shape, dtype=dtype, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors; if there are several, the one they promote to."""
        return functools.reduce(torch.promote_types, (self.header(name).dtype for name in self))

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def read_hf(hf_dir: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Read a folder with config.json, and model.safetensors or shards and their index.

    Returns:
        The fields of ``ModelConfig``, and the canonical tensors, not read yet, in their stored dtype.

    Raises:
        RecipeError: config.json has settings that hlat does not support; lists all.
        CheckpointError: files missing or damaged; tensors missing, unexpected or of another shape; lists all.
    """
    folder = Path(hf_dir)
    fields = hf_to_model(read_json(folder / "config.json"))
    config = ModelConfig.model_validate(fields)
    if problems := model_problems(config):
        raise RecipeError(problems, str(folder / "config.json"))
    found = _find_tensors(folder)
    # First, because the lists below name every tensor of every layer of config.json, however many it claims.
    check_layers(config, len(found), str(folder))
    found = merge_tied(config, found, lambda name: found[name].read())
    shapes, packed = canonical_shapes(config), packed_tensors(hf_class(config).model_type, config.options)
    redundant = _redundant(shapes, found, [each.name for each in packed if each.unpack is None])
    found = {name: tensor for name, tensor in found.items() if name not in redundant}
    stored = packed_shapes([each for each in packed if each.unpack is not None], shapes)
    check_canonical(stored, found, str(folder))
    parts = {
        name: found[source]._replace(shape=shapes[name], take=take)
        for name, (source, take) in sources(packed, shapes).items()
    }
    return fields, LazyTensors(parts)


def read_special_ids(hf_dir: str | Path) -> tuple[SpecialIds, SpecialIds]:
    """Read the special tokens of config.json, and of generation_config.json (the same if there is no such file)."""
    # read_json raises CheckpointError for a damaged file
    folder = Path(hf_dir)
    special = SpecialIds.from_json(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    return special, SpecialIds.from_json(read_json(generation)) if generation.is_file() else special


def _find_tensors(folder: Path) -> dict[str, FileTensor]:
    """Find the tensors of the single file, or else of the shards that the index names: as transformers does.

    CheckpointError: files are missing or damaged, or other programs would read another model (an adapter, two saves).
    """
    if (folder / WEIGHTS).is_file():
        paths = [folder / WEIGHTS]  # an index beside it is of an older save
    elif (folder / INDEX).is_file():
        paths = [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]
    else:
        raise _no_weights(folder)
    absent = [
        f"{path.name}{f' ({link})' if (link := broken_link(path)) else ''}" for path in paths if not path.is_file()
    ]
    if absent:
        raise CheckpointError(f"{folder}: shards listed in the index are missing: {', '.join(absent)}.")
    if (folder / _ADAPTER).is_file():
        raise CheckpointError(
            f"{folder}: has an adapter ({_ADAPTER}) beside the weights of a model, and transformers applies it where "
            f"peft is installed. If the weights have it already, remove {_ADAPTER}; else merge it first: "
            "peft's merge_and_unload, then save_pretrained."
        )
    found: dict[str, FileTensor] = {}
    twice: list[str] = []
    for path in paths:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                header = file.get_slice(name)
                twice += [f"  {name}: in {found[name].file.name} and in {path.name}"] if name in found else []
                dtype = header.get_dtype()
                found[name] = FileTensor(path, name, tuple(header.get_shape()), _DTYPES.get(dtype, dtype))
    if twice:
        head = f"{folder}: {plural(len(twice), 'tensor')} in two shards, as if of two saves. Download or save it again."
        raise CheckpointError("\n".join([head, *twice[:100]]))
    return found


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: no weight_map. Download or copy the file again.")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map[{name!r}] = {file!r} is not a safetensors file in this folder.")
    return files


def _redundant(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, FileTensor], without_effect: list[str]
) -> set[str]:
    """Names of tensors that files have in addition to the weights, and that do not change the model."""
    more = [name for name in found if name not in shapes]
    redundant = {name for name in more if name.endswith(("rotary_emb.inv_freq", *without_effect))}
    # attention_bias of llama and qwen3 includes an output bias, which hlat's models do not have
    has_biases = any(name.endswith("q_proj.bias") for name in shapes)
    biases = {name for name in more if has_biases and name.endswith("o_proj.bias")}
    reason = "is not zero, but hlat's models have no output bias"
    wrong = [f"  {name}: {reason}" for name in biases if found[name].read().any()]
    if wrong:
        raise CheckpointError("\n".join(["these tensors do not fit any model that hlat supports:", *wrong]))
    return redundant | biases


def _no_weights(folder: Path) -> CheckpointError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return CheckpointError(
            f"{folder}: only pickled weights (.bin, .pth); loading a pickle can run code. Convert them on a machine "
            "where you trust them: transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)."
        )
    if (folder / _ADAPTER).is_file():
        return CheckpointError(
            f"{folder}: only an adapter ({_ADAPTER}), without the model that it changes. Merge the two and name the "
            "result: peft's merge_and_unload, then save_pretrained."
        )
    if any(folder.glob("model-*.safetensors")):
        return CheckpointError(f"{folder}: shards without {INDEX}, which lists them. Copy or download it, too.")
    for name in (WEIGHTS, INDEX):
        if link := broken_link(folder / name):
            return CheckpointError(f"{folder / name}: {link}. {_FETCH}")
    return CheckpointError(
        f"{folder}: has neither {WEIGHTS} nor {INDEX}. Name a folder that contains a Hugging Face model."
    )


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file with ``safe_open``; raise any error, also while reading, as a CheckpointError that names the file."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        if found := recognize_file(path):
            raise CheckpointError(f"{path}: this is {found.what}. {found.remedy}") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        remedy = "Download or copy the file again."
        raise CheckpointError(f"{path}: not a complete safetensors file ({error}). {remedy}") from error


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
    """Write a model as a Hugging Face folder, which is returned.

    Args:
        out_dir: the folder to create; an existing one must be empty.
        config: the model; needs ``max_sequence_length``.
        canonical: its tensors by canonical name, or an iterable of (name, tensor) pairs.
        dtype: dtype of the files; None keeps the dtype of each tensor.
        tokenizer_dir: folder to copy the tokenizer files from.
        eos_id: end-of-text token for config.json, or several.
        bos_id: beginning-of-text token.
        pad_id: padding token.
        generation: special tokens for generation_config.json; None for those of config.json.
        family: architecture to write it as, which computes the same; None for its own.
        max_shard_bytes: maximum size of a safetensors file, unless a single tensor is larger.

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
        packed = packed_tensors(hf_class(config, family).model_type, config.options)
        expected = packed_shapes(packed, canonical_shapes(config))
        stored = _write_weights(folder, expected, pack(packed, _cast(pairs, dtype)), max_shard_bytes)
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


def _write_weights(
    folder: Path, expected: Mapping[str, tuple[int, ...]], pairs: Iterable[Named], max_shard_bytes: int
) -> torch.dtype:
    """Write shards and index; return the dtype of the embedding, for config.json."""
    written: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    total, dtype = 0, torch.float32
    for number, shard in enumerate(_shards(pairs, max_shard_bytes), start=1):
        _save(folder / f"{number}.shard", shard)
        shards.append(list(shard))
        # Only names and shapes are kept: tensors may be produced one at a time.
        written |= {name: tensor.to("meta") for name, tensor in shard.items()}
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = shard.get("model.embed_tokens.weight", torch.empty(0, dtype=dtype)).dtype
    check_canonical(expected, written, "the tensors to export")
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)] if len(shards) > 1 else [WEIGHTS]
    # The names of shards have the number of all shards, which is known only now.
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
    # Without this file transformers would use the tokenizer class of the model family.
    content = read_json(file)
    tokens = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
    special = {"bos_token": tokens.get(_first(bos_id)), "eos_token": tokens.get(_first(eos_id))}
    known = {name: token for name, token in special.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}


def _first(ids: TokenIds) -> int | None:
    """The first of several end-of-text ids is the pre-trained model's."""
    return ids[0] if isinstance(ids, list) else ids
