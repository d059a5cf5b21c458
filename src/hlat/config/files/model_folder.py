"""Model and tokenizer of a folder of weights: the numbers of the model section, and where the tokenizer is.

    checkpoint of hlat (meta.json) or Hugging Face folder (config.json) -> ModelFolder

No weights are read. The folder of a run is refused, since its newest checkpoint is another one tomorrow, and the same
recipe would then describe another start.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from hlat.config.files.config_json import read_config_json
from hlat.config.files.hf_import import hf_to_model
from hlat.runtime.storage.small_files import read_small_file

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_LARGEST = 1 << 26  # bytes of a meta.json, which may hold the last metrics of a run
_CHOSEN_ELSEWHERE = ("preset", "hf_config")  # how the run that saved the checkpoint had found its numbers


class ModelFolder(NamedTuple):
    """The model of a folder of weights.

    Attributes:
        fields: fields of the model section.
        tokenizer: folder of its tokenizer, as ``data.tokenizer.path`` takes it; None if it has none.
    """

    fields: dict[str, Any]
    tokenizer: str | None


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the model that a folder of weights holds.

    Args:
        folder: a checkpoint of hlat, or a Hugging Face folder.

    Raises:
        ValueError: it is neither, or unreadable; says why as the end of a sentence, with what would work.
        RecipeError: hlat does not support the model of the config.json; lists every reason.
    """
    if (folder / "meta.json").is_file():
        return ModelFolder(_saved_model(folder), _with_tokenizer(folder / "tokenizer"))
    if (folder / "config.json").is_file():
        return ModelFolder(hf_to_model(read_config_json(folder)), _with_tokenizer(folder))
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    saved = sorted(file.parent for file in (*folder.glob("*/meta.json"), *folder.glob("checkpoints/*/meta.json")))
    if saved:
        raise ValueError(f"it has several checkpoints, and their number changes; name one, such as {saved[-1]}")
    raise ValueError("it has neither meta.json, as checkpoints of hlat do, nor config.json, as Hugging Face models do")


def _saved_model(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads(read_small_file(folder / "meta.json", _LARGEST))
    except OSError as error:
        raise ValueError(f"meta.json: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise ValueError("its meta.json is damaged; hlat checkpoint verify says more") from None
    recipe = meta.get("recipe") if isinstance(meta, dict) else None
    recipe = recipe if isinstance(recipe, dict) else {}
    model = (meta.get("model") if isinstance(meta, dict) else None) or recipe.get("model")
    if not isinstance(model, dict):
        raise ValueError("its meta.json describes no model")
    fields = {name: value for name, value in model.items() if name not in _CHOSEN_ELSEWHERE}
    data = recipe.get("data")
    if fields.get("max_sequence_length") is None and isinstance(data, dict) and "sequence_length" in data:
        fields["max_sequence_length"] = data["sequence_length"]
    return fields


def _with_tokenizer(folder: Path) -> str | None:
    return str(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
