"""Tensors that the files of some families have otherwise than hlat: fused, transposed, or without any effect.

    canonical tensors --pack--> tensors of files
    canonical names, shapes --sources--> the tensor of a file that each is in, and how it is taken out

A ``Packed`` is one tensor of every layer. All others have their canonical names and shapes in files too.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hlat.config import written_fields


@dataclass(frozen=True)
class Packed:
    """A tensor of a layer in files, and the canonical tensors of the layer that it is made of."""

    name: str
    parts: tuple[str, ...]
    pack: Callable[..., torch.Tensor]  # takes the parts
    # Takes the tensor and the rows of each part, returns the parts. None if the tensor has no effect: it is written as
    # ``pack`` makes it, and its parts are tensors of their own.
    unpack: Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]] | None


Named = tuple[str, torch.Tensor]
# Name in files, and what takes the canonical tensor out of that one; None if they are the same
Source = tuple[str, Callable[[torch.Tensor], torch.Tensor] | None]


def _joined(*rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows)


_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_ZERO_OUTPUT_BIAS = Packed("self_attn.o_proj.bias", ("self_attn.o_proj.weight",), lambda x: x.new_zeros(len(x)), None)
_ROUTED = ("mlp.down_proj.bias",)
_PACKED: Mapping[str, tuple[Packed, ...]] = {
    "phi3": (
        Packed(
            "self_attn.qkv_proj.weight",
            tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
            _joined,
            lambda x, rows: x.split(rows),
        ),
        Packed(
            "mlp.gate_up_proj.weight",
            tuple(f"{name}.weight" for name in _GATE_UP),
            _joined,
            lambda x, rows: x.split(rows),
        ),
    ),
    "gpt_oss": (
        *(
            Packed(
                f"mlp.experts.gate_up_proj{suffix}",
                tuple(f"{name}.{kind}" for name in _GATE_UP),
                lambda gate, up: torch.stack((gate, up), dim=1).flatten(0, 1).t()[None].contiguous(),
                lambda x, _: (x[0].t()[::2], x[0].t()[1::2]),
            )
            for kind, suffix in (("weight", ""), ("bias", "_bias"))
        ),
        *(
            Packed(
                f"mlp.experts.down_proj{suffix}",
                (f"mlp.down_proj.{kind}",),
                lambda x: x.t()[None].contiguous(),
                lambda x, _: (x[0].t(),),
            )
            for kind, suffix in (("weight", ""), ("bias", "_bias"))
        ),
        # One expert is chosen whatever the router says.
        Packed("mlp.router.weight", _ROUTED, lambda x: x.new_zeros(1, len(x)), None),
        Packed("mlp.router.bias", _ROUTED, lambda x: x.new_zeros(1), None),
    ),
}


def packed_tensors(family: str, options: Mapping[str, Any]) -> tuple[Packed, ...]:
    """Return the tensors that files of a family have otherwise; ``options`` are those of the model section."""
    # attention_bias of llama and qwen3 includes an output bias, which hlat's models do not have
    has_output_bias = written_fields(family, options).get("attention_bias", False)
    return _PACKED.get(family) or ((_ZERO_OUTPUT_BIAS,) if has_output_bias else ())


_LAYER = re.compile(r"(model\.layers\.\d+\.)(.*)")


def _split(name: str) -> tuple[str, str]:
    """Split the name of a tensor into that of its layer, empty for none, and the rest."""
    found = _LAYER.fullmatch(name)
    return (found[1], found[2]) if found else ("", name)


def pack(packed: Sequence[Packed], pairs: Iterable[Named]) -> Iterator[Named]:
    """Convert named canonical tensors to those of files, in order, as soon as all parts of one are there."""
    inside = {part for each in packed if each.unpack is not None for part in each.parts}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in pairs:
        layer, short = _split(name)
        if short not in inside:
            yield name, tensor
        for each in packed:
            if short in each.parts:
                parts = waiting.setdefault(layer + each.name, {})
                parts[short] = tensor
                if len(parts) == len(each.parts):
                    yield layer + each.name, each.pack(*(parts[part] for part in each.parts))
                    del waiting[layer + each.name]


def packed_shapes(packed: Sequence[Packed], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of files, from those of all canonical tensors."""
    if not packed:
        return dict(shapes)
    headers = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
    return {name: tuple(tensor.shape) for name, tensor in pack(packed, headers)}


def sources(packed: Sequence[Packed], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Source]:
    """Return where each canonical tensor is in files."""
    found: dict[str, Source] = {}
    for name in shapes:
        layer, short = _split(name)
        home = next((each for each in packed if each.unpack is not None and short in each.parts), None)
        if home is None:
            found[name] = name, None
            continue
        rows = [shapes[layer + part][0] for part in home.parts]
        found[name] = layer + home.name, partial(_taken, home, rows, home.parts.index(short))
    return found


def _taken(home: Packed, rows: list[int], index: int, tensor: torch.Tensor) -> torch.Tensor:
    assert home.unpack is not None, "only tensors with an effect are sources"
    # A copy: a view would keep the other parts alive.
    return home.unpack(tensor, rows)[index].clone(memory_format=torch.contiguous_format)
