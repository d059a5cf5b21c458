"""Numbers of the model section from a preset, a config.json, or a folder of weights to start from.

    model: {preset: NAME}      -> the numbers of a built-in model
    model: {hf_config: PATH}   -> the numbers of a config.json
    model: {from: FOLDER}      -> the numbers, and checkpoint.init_from and data.tokenizer.path of the same folder

Instead of a path, hf_config and from take the id of a model of the Hugging Face Hub. Of ``from`` the commit is pinned.

What the section gives itself lies above. ``from`` is resolved here, as ``include`` is when a file is read: the recipe
that results has the three fields it stands for.
"""

from pathlib import Path
from typing import Any

from hlat.config.errors import Problem, RecipeError
from hlat.config.explanations import suggestion
from hlat.config.files.config_json import read_config_json
from hlat.config.files.hf_import import hf_to_model
from hlat.config.files.model_folder import ModelFolder, read_model_folder
from hlat.config.files.yaml_loader import merge
from hlat.config.presets import PRESETS
from hlat.config.sections.architectures import with_fixed_options
from hlat.config.sections.model import ModelConfig
from hlat.runtime.storage.hub import CONFIG_FILES, TOKENIZER_FILES, HubModel

BASES = ("preset", "hf_config", "from")


def expand_model(content: dict[str, Any], refused: set[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Put the numbers of a preset, config.json or folder of weights underneath the model section's own.

    Args:
        content: the sections.
        refused: paths of fields whose values have been refused already.

    Returns:
        The sections with the numbers filled in, or as they were if there are problems; and the problems.
    """
    model = content.get("model")
    if not isinstance(model, dict) or refused & {f"model.{name}" for name in BASES}:
        return content, []
    given = [name for name in BASES if model.get(name) is not None]
    if len(given) > 1:
        head, last = ", ".join(given[:-1]), given[-1]
        problem = f"the recipe gives {'both ' if len(given) == 2 else ''}{head} and {last}."
        return content, [Problem(f"model.{given[0]}", problem, "Keep one of them.", model[given[0]], True)]
    if "from" in model:
        source, model = model["from"], {name: value for name, value in model.items() if name != "from"}
        content = {**content, "model": model}
        if source is not None:
            return _start_from(content, source)
    try:
        base = _numbers(model)
    except RecipeError as error:
        return content, list(error.problems)
    return {**content, "model": with_fixed_options(merge(base, model))}, []


_COMPARED = ("architecture", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim")


def model_differences(model: ModelConfig, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Compare a model with that of a folder of weights, by the fields that decide the shapes of layers.

    Args:
        model: the model of a recipe.
        folder: a checkpoint, a run, or a Hugging Face folder.

    Returns:
        Fields that differ, with the value of the folder and that of the model; empty if the folder cannot be read,
        which its reader says better.
    """
    newest = [*sorted(folder.glob("step-*")), *sorted(folder.glob("checkpoints/step-*"))][-1:]
    for candidate in (folder, *newest):
        try:
            stored = ModelConfig.model_validate(read_model_folder(candidate).fields)
        except (ValueError, OSError, RecipeError):
            continue
        there, here = _shape(stored), _shape(model)
        return {name: (there[name], here[name]) for name in _COMPARED if there[name] != here[name]}
    return {}


def _shape(model: ModelConfig) -> dict[str, Any]:
    width = model.head_dim or model.hidden_size // model.heads
    return {name: getattr(model, name) for name in _COMPARED} | {
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": width,
    }


def read_hf_config(name: Any) -> dict[str, Any]:
    """Read the numbers of a Hugging Face config.json.

    Args:
        name: path of the file or of its folder, as the recipe gives it.

    Raises:
        RecipeError: it cannot be read, or hlat does not support the model.
    """
    remedy = "Name a Hugging Face config.json or the folder that holds it."
    try:
        if not isinstance(name, str):
            raise ValueError("it is not a path")
        hub = HubModel.parse(name)
        config = read_config_json(Path(name) if hub is None else hub.snapshot(CONFIG_FILES))
    except ValueError as error:
        raise RecipeError([Problem("model.hf_config", f"cannot be read: {error}.", remedy, name, True)]) from error
    return hf_to_model(config)


def _numbers(model: dict[str, Any]) -> dict[str, Any]:
    """Numbers of the preset or config.json that a model section names; empty if it names none."""
    preset, hf_config = model.get("preset"), model.get("hf_config")
    if preset is None:
        return {} if hf_config is None else read_hf_config(hf_config)
    if not isinstance(preset, str) or preset not in PRESETS:
        remedy = f"{suggestion(str(preset), PRESETS)}Known: {', '.join(PRESETS)}."
        raise RecipeError([Problem("model.preset", "there is no such preset.", remedy, preset, True)])
    return PRESETS[preset]


def _start_from(content: dict[str, Any], source: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Fill in the model, the initial weights and the tokenizer of a folder of weights."""
    remedy = (
        "Name a checkpoint of hlat, a Hugging Face folder with its safetensors files, or the id of a model of the Hub."
    )
    try:
        if not isinstance(source, str):
            raise ValueError("it is not a path")
        start, found = _open(source)
    except ValueError as error:
        return content, [Problem("model.from", f"cannot be used: {error}.", remedy, source, True)]
    except RecipeError as error:
        return content, list(error.problems)
    filled = {**content, "model": with_fixed_options(merge(found.fields, content["model"]))}
    checkpoint, data = content.get("checkpoint", {}), content.get("data", {})
    if isinstance(checkpoint, dict):
        if checkpoint.get("init_from") is not None:
            both = "the recipe gives both model.from and checkpoint.init_from."
            return content, [Problem("checkpoint.init_from", both, "Keep one of them.", checkpoint["init_from"], True)]
        filled["checkpoint"] = {**checkpoint, "init_from": start}
    tokenizer = data.get("tokenizer", {}) if isinstance(data, dict) and data else None
    if not isinstance(tokenizer, dict) or tokenizer.get("path") is not None:
        return filled, []
    if found.tokenizer is None:
        absent = "the folder has no tokenizer.json or tokenizer.model, and another tokenizer has other token ids."
        return filled, [
            Problem("model.from", absent, "Set data.tokenizer.path to the model's tokenizer.", source, True)
        ]
    filled["data"] = {**data, "tokenizer": {**tokenizer, "path": found.tokenizer}}
    return filled, []


def _open(source: str) -> tuple[str, ModelFolder]:
    """Return the weights to start from, as ``checkpoint.init_from`` takes them, and what their folder says."""
    hub = HubModel.parse(source)
    if hub is None:
        folder = Path(source)
        return str(folder), read_model_folder(folder)
    snapshot = hub.snapshot((*CONFIG_FILES, *TOKENIZER_FILES))
    pinned, found = str(hub.pinned(snapshot)), read_model_folder(snapshot)
    return pinned, found._replace(tokenizer=None if found.tokenizer is None else pinned)
