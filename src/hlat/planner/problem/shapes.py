"""Shapes of LLaMA-class models by size, for sizes that no preset has.

    "llama-class-5.1b" -> the nearest of some shapes like those of Llama 3 -> fields of a recipe's model section

The shapes follow Llama 3 (arXiv 2407.21783, table 3) and the config.json files of Llama 3.2.
"""

import re
from functools import cache
from typing import Any

from hlat.config import ModelConfig
from hlat.model import count_parameters

SHAPE_SEQUENCE = 8192
"""Context of every shape, and tokens per sequence where nobody says how many."""

_LLAMA_CLASS = re.compile(r"llama-class-(\d+(?:\.\d+)?)([mb])", re.IGNORECASE)
_SIZE_UNITS = {"m": 1e6, "b": 1e9}
_WIDTHS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384)
_WIDTH_PER_LAYER = (90, 150)  # of the shapes; between those of Llama 3, and a little beyond
_USUAL_WIDTH_PER_LAYER = 115  # Llama 3's and 3.2's have 102 to 130
_APART = 1.02  # two shapes closer than that are one: the one of the usual proportions


def llama_class(name: str) -> dict[str, Any] | None:
    """Model section of the shape whose size is nearest to the name's; None for any other name."""
    found = _LLAMA_CLASS.fullmatch(name.strip())
    if found is None or not float(found[1]):
        return None
    return nearest_shape(float(found[1]) * _SIZE_UNITS[found[2].lower()])[1]


def nearest_shape(parameters: float) -> tuple[str, dict[str, Any], int]:
    """Shape whose size is nearest to a number of parameters: its name, model section and size."""
    size, section = min(llama_class_shapes(), key=lambda shape: max(shape[0] / parameters, parameters / shape[0]))
    words = f"{size / 1e9:.3g}b" if size >= 1e9 else f"{size / 1e6:.3g}m"
    return f"llama-class-{words}", section, size


@cache
def llama_class_shapes() -> list[tuple[int, dict[str, Any]]]:
    """Sizes and model sections, the smallest first."""
    every = []
    for width in _WIDTHS:
        least, most = (width / ratio for ratio in reversed(_WIDTH_PER_LAYER))
        for layers in range(2 * max(1, round(least / 2)), round(most) + 1, 2):
            section = _llama_class_section(width, layers)
            every.append((count_parameters(ModelConfig.model_validate(section)).total, width / layers, section))
    every.sort(key=lambda shape: shape[0])
    kept: list[tuple[int, float, dict[str, Any]]] = []
    for shape in every:
        if kept and shape[0] < _APART * kept[-1][0]:
            kept[-1] = min(kept[-1], shape, key=lambda one: abs(one[1] - _USUAL_WIDTH_PER_LAYER))
        else:
            kept.append(shape)
    return [(size, section) for size, _, section in kept]


def _llama_class_section(width: int, layers: int) -> dict[str, Any]:
    # Heads of 64 up to a width of 2,048 and shared embeddings up to 3,072: Llama 3.2's config.json files. 8 kv heads (4
    # where 8 do not divide the heads) and feed-forward layers 3.5 times as wide: Llama 3.
    heads = width // (64 if width <= 2048 else 128)
    return {
        "vocab_size": 128256,  # Llama 3's tokenizer
        "layers": layers,
        "hidden_size": width,
        "intermediate_size": 7 * width // 2,
        "heads": heads,
        "kv_heads": 8 if heads % 8 == 0 else 4,
        "tie_embeddings": width <= 3072,
        "rope": {"theta": 500000.0},
        "norm_eps": 1e-5,
        "max_sequence_length": SHAPE_SEQUENCE,
    }
