"""Read a Hugging Face folder: model fields, and tensors under canonical names.

    config.json -> hf_to_model -> fields -> expected names and shapes
    *.safetensors -> headers -> found names and shapes -> all differences at once -> tensors, read on access

Only safetensors files are read: a ``.bin`` file is a pickle, and loading a pickle can run code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hlat.config import RecipeError
from hlat.config.files import hf_to_model
from hlat.config.rules import model_problems
from hlat.config.sections import ModelConfig
from hlat.model.hf.config import SpecialIds
from hlat.model.hf.files import INDEX, WEIGHTS, read_json
from hlat.model.hf.names import canonical_shapes, check_canonical, check_layers
from hlat.runtime import CheckpointError
from hlat.runtime.storage import recognize_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors in safetensors files by name, each read on access, in order of execution."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    def __getitem__(self, name: str) -> torch.Tensor:
        with _open(self._files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def header(self, name: str) -> torch.Tensor:
        """Read shape and data type of a tensor: a tensor without values, on the meta device.

        Raises:
            CheckpointError: the file is damaged, or the data type is not one of floating-point numbers.
        """
        with _open(self._files[name]) as file:
            found = file.get_slice(name)
            shape, dtype = found.get_shape(), found.get_dtype()
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{self._files[name]}: {name} has the data type {dtype}; weights have floating point."
            )
        return torch.empty(shape, dtype=_DTYPES[dtype], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


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
    files, shapes = _find_tensors(folder)
    check_layers(config, len(files), str(folder))
    tensors = LazyTensors(files)
    _drop_redundant(config, tensors, files, shapes)
    expected = canonical_shapes(config)
    check_canonical(expected, shapes, str(folder))
    return fields, LazyTensors({name: files[name] for name in expected})


def read_special_ids(hf_dir: str | Path) -> tuple[SpecialIds, SpecialIds]:
    """Read the special tokens of config.json, and of generation_config.json (the same if there is no such file).

    Raises:
        CheckpointError: a file is damaged.
    """
    folder = Path(hf_dir)
    special = SpecialIds.from_json(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    return special, SpecialIds.from_json(read_json(generation)) if generation.is_file() else special


def _find_tensors(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Find file and shape of every tensor from the file headers, and check the index against them."""
    indexed: dict[str, str] = {}
    if (folder / INDEX).is_file():
        indexed = _weight_map(folder / INDEX)
        paths = [folder / name for name in sorted(set(indexed.values()))]
    elif (folder / WEIGHTS).is_file():
        paths = [folder / WEIGHTS]
    else:
        raise _no_weights(folder)
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise CheckpointError(f"{folder}: shards listed in the index are missing: {', '.join(absent)}.")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if indexed and indexed.get(name) != path.name:
                    continue  # listed in another file; if the index does not list it, transformers ignores it as well
                files[name], shapes[name] = path, tuple(file.get_slice(name).get_shape())
    return files, shapes


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: no weight_map. Download or copy the file again.")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map[{name!r}] = {file!r} is not a safetensors file in this folder.")
    return files


def _drop_redundant(
    config: ModelConfig, tensors: LazyTensors, files: dict[str, Path], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Remove tensors that old files store in addition to the weights, if that does not change the model."""
    redundant = [name for name in files if name.endswith("rotary_emb.inv_freq")]
    if config.qkv_bias:
        # attention_bias of llama and qwen3 includes an output bias, which hlat's models do not have
        biases = [name for name in files if name.endswith("o_proj.bias")]
        _raise_unless(
            biases, lambda name: not bool(tensors[name].any()), "is not zero, but hlat's models have no output bias"
        )
        redundant += biases
    if config.tie_embeddings and "lm_head.weight" in files:
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        same = embedding in files and torch.equal(tensors[head], tensors[embedding])
        _raise_unless([head], lambda _: same, "differs from the embedding, although config.json ties them")
        redundant.append(head)
    for name in redundant:
        del files[name], shapes[name]


def _raise_unless(names: list[str], harmless: Callable[[str], bool], reason: str) -> None:
    wrong = [f"  {name}: {reason}" for name in names if not harmless(name)]
    if wrong:
        raise CheckpointError("\n".join(["these tensors do not fit any model that hlat supports:", *wrong]))


def _no_weights(folder: Path) -> CheckpointError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return CheckpointError(
            f"{folder}: only pickled weights (.bin, .pth); loading a pickle can run code. Convert them on a machine "
            "where you trust them: transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)."
        )
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
        raise CheckpointError(f"{path}: damaged or truncated ({error}). {remedy}") from error
