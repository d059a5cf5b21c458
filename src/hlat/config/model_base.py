"""Numbers of the model section from a preset, a config.json, or a folder of weights to start from.

    model: {preset: NAME}      -> the numbers of a built-in model: PRESETS, each with its source in a comment
    model: {hf_config: PATH}   -> the numbers of a config.json
    model: {from: FOLDER}      -> the numbers, and checkpoint.init_from and data.tokenizer.path of the same folder

Instead of a path, hf_config and from take the id of a model of the Hugging Face Hub. Of ``from`` the commit is pinned.

What the section gives itself lies above. ``from`` is resolved here, as ``include`` is when a file is read: the recipe
that results has the three fields it stands for.
"""

import difflib
import math
import re
from pathlib import Path
from typing import Any

from hlat.config.errors import Problem, RecipeError
from hlat.config.model_files import ModelFolder, hf_to_model, read_config_json, read_model_folder
from hlat.config.sections.model import WIDEST, ModelConfig, with_fixed_options
from hlat.config.yaml_files import merge
from hlat.runtime.storage.hub import CONFIG_FILES, TOKENIZER_FILES, HubModel

_LLAMA31_SCALING = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 8192,
}


_SIZES = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size")


def _preset(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a model, of which ``sizes`` are those of ``_SIZES``, in that order."""
    return {**dict(zip(_SIZES, sizes, strict=True)), **more}


_LLAMA31_ROPE = {"theta": 500000.0, "scaling": _LLAMA31_SCALING}
_LLAMA_405B = _preset(126, 16384, 53248, 128, 8, 128256, max_sequence_length=131072, rope=_LLAMA31_ROPE)
_LLAMA31: dict[str, Any] = {"rope": _LLAMA31_ROPE, "norm_eps": 1e-5, "max_sequence_length": 131072}
_LLAMA32 = {
    **_LLAMA31,
    "tie_embeddings": True,
    "rope": {"theta": 500000.0, "scaling": {**_LLAMA31_SCALING, "factor": 32.0}},
}
_LLAMA3 = {"rope": {"theta": 500000.0}, "norm_eps": 1e-5, "max_sequence_length": 8192}


def _qwen25(*sizes: int, **more: Any) -> dict[str, Any]:
    common = {"architecture": "qwen2", "rope": {"theta": 1000000.0}, "norm_eps": 1e-6, "max_sequence_length": 131072}
    return _preset(*sizes, **{**common, **more})


def _smollm2(*sizes: int, **more: Any) -> dict[str, Any]:
    common = {"tie_embeddings": True, "rope": {"theta": 100000.0}, "norm_eps": 1e-5, "max_sequence_length": 8192}
    return _preset(*sizes, 49152, **{**common, **more})


def _qwen3(*sizes: int, **more: Any) -> dict[str, Any]:
    common = {"architecture": "qwen3", "head_dim": 128, "rope": {"theta": 1000000.0}, "norm_eps": 1e-6}
    return _preset(*sizes, 8, 151936, max_sequence_length=40960, **common, **more)


def _gpt2(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _preset(layers, hidden, ffn, heads, heads, 50257, tie_embeddings=True, max_sequence_length=1024)


PRESETS: dict[str, dict[str, Any]] = {
    # HLAT's two models: arXiv 2404.10630 and the configuration files of awslabs/HLAT.
    "llama-2-7b": _preset(32, 4096, 11008, 32, 32, 32000, max_sequence_length=4096),
    "llama-2-13b": _preset(40, 5120, 13824, 40, 40, 32000, max_sequence_length=4096),  # arXiv 2307.09288; config.json
    "llama-2-70b": _preset(80, 8192, 28672, 64, 8, 32000, max_sequence_length=4096),
    # "The Llama 3 herd of models", arXiv 2407.21783, table 3; published config.json files.
    "llama-3-8b": _preset(32, 4096, 14336, 32, 8, 128256, **_LLAMA3),
    "llama-3-70b": _preset(80, 8192, 28672, 64, 8, 128256, **_LLAMA3),
    "llama-3-405b": _LLAMA_405B,  # a name of its table 3; the model was released as Llama 3.1
    "llama-3.1-405b": _LLAMA_405B,
    # The config.json files of meta-llama/Llama-3.1-8B and Llama-3.2-1B.
    "llama-3.1-8b": _preset(32, 4096, 14336, 32, 8, 128256, **_LLAMA31),
    "llama-3.1-70b": _preset(80, 8192, 28672, 64, 8, 128256, **_LLAMA31),
    "llama-3.2-1b": _preset(16, 2048, 8192, 32, 8, 128256, **_LLAMA32),
    "llama-3.2-3b": _preset(28, 3072, 8192, 24, 8, 128256, **_LLAMA32),
    # The config.json files of Qwen/Qwen2.5-*; "Qwen2.5 technical report", arXiv 2412.15115, table 1.
    "qwen2.5-0.5b": _qwen25(24, 896, 4864, 14, 2, 151936, tie_embeddings=True, max_sequence_length=32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 8960, 12, 2, 151936, tie_embeddings=True),
    "qwen2.5-3b": _qwen25(36, 2048, 11008, 16, 2, 151936, tie_embeddings=True, max_sequence_length=32768),
    "qwen2.5-7b": _qwen25(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _qwen25(48, 5120, 13824, 40, 8, 152064, norm_eps=1e-5),
    "qwen2.5-32b": _qwen25(64, 5120, 27648, 40, 8, 152064, norm_eps=1e-5),
    "qwen2.5-72b": _qwen25(80, 8192, 29568, 64, 8, 152064, norm_eps=1e-5),
    # The config.json files of Qwen/Qwen3-*; "Qwen3 technical report", arXiv 2505.09388, table 1.
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tie_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tie_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    # "Mistral 7B", arXiv 2310.06825, table 1; config.json of mistralai/Mistral-7B-v0.1. Later versions have no window,
    # and v0.3 has a vocabulary of 32768 and theta 1000000.
    "mistral-7b": _preset(
        *(32, 4096, 14336, 32, 8, 32000),
        architecture="mistral",
        sliding_window=4096,
        rope={"theta": 10000.0},
        norm_eps=1e-5,
        max_sequence_length=32768,
    ),
    # "SmolLM2", arXiv 2502.02737; the config.json files of HuggingFaceTB/SmolLM2-*.
    "smollm2-135m": _smollm2(30, 576, 1536, 9, 3, init_std=1 / 24),
    "smollm2-360m": _smollm2(32, 960, 2560, 15, 5),
    "smollm2-1.7b": _smollm2(24, 2048, 8192, 32, 32, rope={"theta": 130000.0}),
    # "TinyLlama", arXiv 2401.02385, table 1; config.json of TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T.
    "tinyllama-1.1b": _preset(22, 2048, 5632, 32, 4, 32000, norm_eps=1e-5, max_sequence_length=2048),
    # LLaMA-class models of GPT-2's width, depth, heads, vocabulary and context ("Language models are unsupervised
    # multitask learners", 2019, table 2): RMSNorm, RoPE and SwiGLU instead of its parts, and an inner width with which
    # the number of parameters is that of GPT-2 within 1 %. Its weights do not fit them.
    "gpt2-124m": _gpt2(12, 768, 2048, 12),
    "gpt2-355m": _gpt2(24, 1024, 2752, 16),
    "gpt2-774m": _gpt2(36, 1280, 3424, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 4288, 25),
    # Small models for laptops and tests. Their vocabularies are the sizes that hlat trains tokenizers to.
    "tiny-1m": _preset(4, 128, 344, 4, 4, 1024),
    "tiny-10m": _preset(6, 288, 768, 6, 2, 8192),
    "tiny-34m": _preset(8, 512, 1536, 8, 4, 8192),
    "tiny-125m": _preset(12, 768, 2048, 12, 4, 32000),
}

_USUAL = ("tiny-10m", "llama-3.2-1b", "llama-3-8b")
_LONGEST_NAME = 100  # characters of a name that is compared


def near_presets(model: Any) -> str:
    """Name three presets, as a clause: nearest to a name or to the numbers of a section; the usual ones for neither."""
    sizes = {name: model[name] for name in _SIZES if isinstance(model, dict) and _is_size(model.get(name))}
    if isinstance(model, str) and model:
        names = difflib.get_close_matches(model.lower()[:_LONGEST_NAME], PRESETS, n=3, cutoff=0.0)
    elif sizes:
        # By ratio: twice as large is as far as half.
        names = sorted(PRESETS, key=lambda name: sum(abs(math.log(PRESETS[name][k] / n)) for k, n in sizes.items()))[:3]
    else:
        names = list(_USUAL)
    return f"{', '.join(names[:-1])} or {names[-1]} (hlat recipe presets lists all)"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= WIDEST


_COPY_SUFFIX = re.compile(r"-(?:hf|base|instruct|chat)$")
# The version of a release that has the numbers of the preset; others differ: see mistral-7b above, and the first
# TinyLlama-1.1B-Chat versions, v0.1 to v0.6, of which some have more tokens.
_PRESET_VERSIONS = {"mistral-7b": "v0.1", "tinyllama-1.1b": "v1.0"}


def preset_called(name: str) -> str | None:
    """Return the preset that a usual spelling of its name means, such as ``meta-llama/Llama-3.1-8B-Instruct``."""
    # Owner, capitals, separators and the ending of a converted or fine-tuned copy make no difference. A version does.
    plain = name.lower().replace("_", "-").rpartition("/")[2].removeprefix("meta-")
    spelled = {preset.replace("-", ""): preset for preset in PRESETS}
    spelled |= {(preset + version).replace("-", ""): preset for preset, version in _PRESET_VERSIONS.items()}
    # Several endings may follow each other, as in llama-2-7b-chat-hf.
    while (shorter := _COPY_SUFFIX.sub("", re.sub(r"-(hf|base|instruct|chat)-(v\d[\d.]*)$", r"-\2", plain))) != plain:
        plain = shorter
    return spelled.get(plain.replace("-", ""))


BASES = ("preset", "hf_config", "from")


def expand_model(content: dict[str, Any], refused: set[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Put the numbers of a preset, config.json or folder underneath the model section's own; also return problems."""
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
    """Compare with the model in a folder of weights; return differing fields with its value and the model's."""
    newest = [*sorted(folder.glob("step-*")), *sorted(folder.glob("checkpoints/step-*"))][-1:]
    # The folder itself, or the newest checkpoint of a run.
    for candidate in (folder, *newest):
        try:
            stored = ModelConfig.model_validate(read_model_folder(candidate).fields)
        # Whoever reads the folder later says better what is wrong with it.
        except (ValueError, OSError, RecipeError):
            continue
        there, here = _shape(stored), _shape(model)
        return {name: (there[name], here[name]) for name in _COMPARED if there[name] != here[name]}
    return {}


def _shape(model: ModelConfig) -> dict[str, Any]:
    # Defaults are resolved: a config.json may write out what a recipe leaves out.
    resolved = {"kv_heads": model.n_kv_heads, "head_dim": model.n_head_dim}
    return {name: getattr(model, name) for name in _COMPARED} | resolved


def read_hf_config(name: Any) -> dict[str, Any]:
    """Read the numbers of a Hugging Face config.json, or of its folder; RecipeError if that is not possible."""
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
    preset, hf_config = model.get("preset"), model.get("hf_config")
    if preset is None:
        return {} if hf_config is None else read_hf_config(hf_config)
    if not isinstance(preset, str) or preset not in PRESETS:
        remedy = f"The nearest are {near_presets(preset)}."
        raise RecipeError([Problem("model.preset", "there is no such preset.", remedy, preset, True)])
    return PRESETS[preset]


def _start_from(content: dict[str, Any], source: Any) -> tuple[dict[str, Any], list[Problem]]:
    remedy = (
        "Name a checkpoint of hlat, a Hugging Face folder with its safetensors files, or the id of a model of the Hub."
    )
    try:
        if not isinstance(source, str):
            raise ValueError("it is not a path")
        start, found = _open_folder(source)
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


def _open_folder(source: str) -> tuple[str, ModelFolder]:
    """Return the weights to start from, as ``checkpoint.init_from`` takes them, and what their folder says."""
    hub = HubModel.parse(source)
    if hub is None:
        folder = Path(source)
        return str(folder), read_model_folder(folder)
    snapshot = hub.snapshot((*CONFIG_FILES, *TOKENIZER_FILES))
    # The commit is pinned: a model of the Hub may change while the run goes on.
    pinned, found = str(hub.pinned(snapshot)), read_model_folder(snapshot)
    return pinned, found._replace(tokenizer=None if found.tokenizer is None else pinned)
