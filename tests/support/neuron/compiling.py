"""The compiler ``neuron`` of the test device: graphs are traced forward and backward; each is one launch.

A compiled graph is a file in the folder that TORCH_NEURONX_NEFF_CACHE_DIR names, as with the real compiler. It is empty
but for the name: what counts is if it was there.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.neuron.device_module import native

FAILS_ENV = "HLAT_STAND_IN_COMPILER_SAYS"
"""What the compiler says instead of compiling: it ends with exit code 70, as neuronx-cc does."""

SECONDS_ENV = "HLAT_STAND_IN_COMPILER_SECONDS"
"""Seconds for a graph that is not in the cache."""

COMPILED = [0]  # graphs of this process
NOT_CACHED = [0]  # those of them that were not in the cache


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph as ``aot_eager`` does. Dynamic shapes are refused, as neuronx-cc does."""
    from torch._dynamo.backends.debugging import aot_eager  # noqa: PLC0415

    symbolic = [value for value in inputs if isinstance(value, torch.SymInt)]
    assert not symbolic, f"neuron: a graph with dynamic shapes: {symbolic}"
    COMPILED[0] += 1
    _look_up(graph, inputs)
    compiled: Callable[..., Any] = aot_eager(graph, inputs, _one_launch, _one_launch, **options)
    return compiled


def _one_launch(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a traced graph, whose operators are counted as one."""
    from torch._dynamo.backends.debugging import boxed_nop  # noqa: PLC0415

    operators = boxed_nop(graph, inputs)

    def run(arguments: list[Any]) -> Any:
        native().stand_in_begin_graph()
        try:
            return operators(arguments)
        finally:
            native().stand_in_end_graph()

    run._boxed_call = True  # type: ignore[attr-defined]  (torch passes a list, which it may empty)
    return run


def _look_up(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    shapes = [(tuple(value.shape), str(value.dtype)) for value in inputs if isinstance(value, torch.Tensor)]
    with_gradients = torch.is_grad_enabled()
    key = hashlib.sha256(f"{graph.code} {shapes} {with_gradients}".encode()).hexdigest()
    file = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"], f"MODULE_{key}", "model.neff")
    if not file.is_file():
        NOT_CACHED[0] += 1
        if says := os.environ.get(FAILS_ENV):
            raise RuntimeError(
                "StableHLO to NEFF compilation failed for torch.compile: Command failed (neuronx-cc compilation) "
                f"with exit code 70: {says}"
            )
        time.sleep(float(os.environ.get(SECONDS_ENV, "0")))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(key)
