"""Models and recipes that are measured: the same for predictions, for the compilers' cache, and for the measurement.

case, tiny or not --recipe--> Recipe: no data is read, tokens are random
"""

from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.config.load import parse_recipe

_LLAMA = {"vocab_size": 128256, "rope": {"theta": 500000.0}, "heads": 32, "kv_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    # 8 of the 32 blocks of Llama 3 8B, with its embedding and head: 2.8 B parameters, whose state fits in 80 GB
    "r8": {**_LLAMA, "layers": 8, "hidden_size": 4096, "intermediate_size": 14336},
    "1b": {**_LLAMA, "layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "tie_embeddings": True},
    "33m": {"vocab_size": 4096, "layers": 8, "hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 4},
    "parity": {
        "vocab_size": 512,
        "layers": 2,
        "hidden_size": 128,
        "intermediate_size": 352,
        "heads": 4,
        "kv_heads": 2,
    },
}
_TINY = {"vocab_size": 320, "layers": 2, "hidden_size": 64, "intermediate_size": 96, "heads": 4, "kv_heads": 2}
LENGTHS = {"r8": 8192, "1b": 8192, "33m": 512, "parity": 128}
_DOCUMENT = 4  # documents in a row where attention stays within them

CASES: dict[str, dict[str, Any]] = {
    # case -> overrides of the default recipe; the model is the part of the name before the first hyphen
    "r8": {},
    "r8-fast": {"run.deterministic": False},
    "r8-eager": {"run.compile": "none"},
    "r8-documents": {"data.isolate": True},
    "r8-bf16-sr": {"precision.mode": "bf16-sr"},
    "r8-fp8": {"precision.mode": "fp8", "run.deterministic": False},
    "1b": {},
    "1b-fast": {"run.deterministic": False},
}


def recipe(
    model: str, tiny: bool, device: str, work: Path, overrides: dict[str, Any] | None = None, *, layers: int = 0
) -> Recipe:
    """Build a recipe of one process, with four micro-batches of one sequence in a step.

    Args:
        model: key of ``MODELS``.
        tiny: True for a model of the same structure that a CPU computes in a second.
        device: device type.
        work: folder of run and compiled code.
        overrides: values by dotted field.
        layers: number of layers; 0 for that of the model.
    """
    sizes = {**MODELS[model], **(_TINY if tiny else {})}
    if layers:
        sizes["layers"] = layers
    length = 64 if tiny else LENGTHS[model]
    content = {
        "run": {
            "name": model,
            "dir": str(work / "run"),
            "device": device,
            "deterministic": True,
            "compile": "blocks",
            "compile_cache": str(work / "compiled"),
        },
        "model": sizes,
        "data": {"path": str(work / "no.txt"), "prepared_dir": str(work / "no"), "sequence_length": length},
        "batch": {"global_batch": 4, "micro_batch": 1},
        "training": {"steps": 100},
        "schedule": {"warmup_steps": 2},
        "optimizer": {"lr": 1e-3},
        "precision": {"mode": "mixed"},
    }
    return parse_recipe(content, model, [f"{field}={_text(value)}" for field, value in (overrides or {}).items()])


def case_recipe(case: str, tiny: bool, device: str, work: Path, **changes: Any) -> Recipe:
    """Build the recipe of a case of ``CASES``."""
    overrides = {**CASES[case], **changes.pop("overrides", {})}
    if tiny and overrides.get("precision.mode") == "fp8":
        overrides["precision.mode"] = "mixed"  # no CPU has fp8 products
    return recipe(case.partition("-")[0], tiny, device, work, overrides, **changes)


def documents(recipe: Recipe, rows: int) -> Any:
    """Return the position of each token in its document, (rows, length); None if the recipe does not isolate them."""
    if not recipe.data.isolate:
        return None
    import torch

    length = recipe.data.sequence_length
    return (torch.arange(length) % (length // _DOCUMENT)).expand(rows, -1).contiguous()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
