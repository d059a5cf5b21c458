"""Read a Hugging Face folder: model fields, and tensors under canonical names.

    config.json -> hf_to_model -> fields -> expected names and shapes
    model.safetensors, or else the index and its shards -> headers -> all differences at once -> tensors, read on access

Only safetensors files are read: a ``.bin`` file is a pickle, and loading a pickle can run code.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hlat.config import ModelConfig, RecipeError, hf_to_model, model_problems
from hlat.model.hf.config import SpecialIds
from hlat.model.hf.files import INDEX, WEIGHTS, read_json
from hlat.model.hf.names import canonical_shapes, check_canonical, check_layers, merge_tied
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.file_content import recognize_file
from hlat.runtime.terminal_text import plural

_ADAPTER = "adapter_config.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FileTensor(NamedTuple):
    """A tensor in a safetensors file, as the header of the file describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # the file's word for it, if weights do not have this type

    def read(self) -> torch.Tensor:
        """Read the values."""
        with _open(self.file) as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors in safetensors files by canonical name, each read on access, in order of execution."""

    def __init__(self, found: Mapping[str, FileTensor]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._found[name].read()

    def header(self, name: str) -> torch.Tensor:
        """Return shape and data type of a tensor: a tensor without values, on the meta device."""
        dtype = self._found[name].dtype
        assert isinstance(dtype, torch.dtype), "read_hf refuses other types"
        return torch.empty(self._found[name].shape, dtype=dtype, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensors; if there are several, the one they promote to."""
        return functools.reduce(torch.promote_types, (self.header(name).dtype for name in self))

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def read_hf(hf_dir: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Read a model folder.

    Args:
        hf_dir: a folder with config.json, and model.safetensors or shards and their index.

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
    check_layers(config, len(found), str(folder))
    found = merge_tied(config, found, lambda name: found[name].read())
    for name in _redundant(config, found):
        del found[name]
    expected = canonical_shapes(config)
    check_canonical(expected, found, str(folder))
    return fields, LazyTensors({name: found[name] for name in expected})


def read_special_ids(hf_dir: str | Path) -> tuple[SpecialIds, SpecialIds]:
    """Read the special tokens of config.json, and of generation_config.json (the same if there is no such file).

    Raises:
        CheckpointError: a file is damaged.
    """
    folder = Path(hf_dir)
    special = SpecialIds.from_json(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    return special, SpecialIds.from_json(read_json(generation)) if generation.is_file() else special


def _find_tensors(folder: Path) -> dict[str, FileTensor]:
    """Find the tensors of the single file, or else of the shards that the index names: as transformers does.

    Raises:
        CheckpointError: there are no such files, or some are missing or damaged; or the folder is another model for
            other programs, because it has an adapter too, or shards of two models.
    """
    if (folder / WEIGHTS).is_file():
        paths = [folder / WEIGHTS]  # an index beside it is of an older save
    elif (folder / INDEX).is_file():
        paths = [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]
    else:
        raise _no_weights(folder)
    absent = [path.name for path in paths if not path.is_file()]
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


def _redundant(config: ModelConfig, found: Mapping[str, FileTensor]) -> list[str]:
    """Names of tensors that files have in addition to the weights, and that do not change the model."""
    redundant = [name for name in found if name.endswith("rotary_emb.inv_freq")]
    if not config.qkv_bias:
        return redundant
    # attention_bias of llama and qwen3 includes an output bias, which hlat's models do not have
    biases = [name for name in found if name.endswith("o_proj.bias")]
    reason = "is not zero, but hlat's models have no output bias"
    wrong = [f"  {name}: {reason}" for name in biases if found[name].read().any()]
    if wrong:
        raise CheckpointError("\n".join(["these tensors do not fit any model that hlat supports:", *wrong]))
    return redundant + biases


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
