"""The compiler ``neuron`` of the test device: graphs are traced forward and backward, and run operator by operator.

A compiled graph is a file in the folder that TORCH_NEURONX_NEFF_CACHE_DIR names, as with the real compiler. It is empty
but for the name: what counts is if it was there.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

COMPILED = [0]  # graphs of this process
NOT_CACHED = [0]  # those of them that were not in the cache


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph as ``aot_eager`` does. Dynamic shapes are refused, as neuronx-cc does."""
    from torch._dynamo.backends.debugging import aot_eager  # noqa: PLC0415

    symbolic = [value for value in inputs if isinstance(value, torch.SymInt)]
    assert not symbolic, f"neuron: a graph with dynamic shapes: {symbolic}"
    COMPILED[0] += 1
    _look_up(graph, inputs)
    compiled: Callable[..., Any] = aot_eager(graph, inputs, **options)
    return compiled


def _look_up(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    shapes = [(tuple(value.shape), str(value.dtype)) for value in inputs if isinstance(value, torch.Tensor)]
    with_gradients = torch.is_grad_enabled()
    key = hashlib.sha256(f"{graph.code} {shapes} {with_gradients}".encode()).hexdigest()
    file = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"], f"MODULE_{key}", "model.neff")
    if not file.is_file():
        NOT_CACHED[0] += 1
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(key)
