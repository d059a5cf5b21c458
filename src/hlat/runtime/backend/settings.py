"""Settings of the process that computing with hlat changes, and their restoration for a caller that is not hlat."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_COMPILER_SETTINGS = "torch._inductor.config"
_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore environment variables and settings of torch at the end of the block: those that ``join_run`` changes.

    One setting stays: on Linux, malloc keeps freed memory from the first run on.
    """
    environment = dict(os.environ)
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    matmul = torch.backends.cuda.matmul
    reductions = {name: getattr(matmul, name) for name in _REDUCTIONS}
    compiler = sys.modules.get(_COMPILER_SETTINGS)
    deterministic = getattr(compiler, "deterministic", None)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        for name, value in reductions.items():
            setattr(matmul, name, value)
        if (compiler := sys.modules.get(_COMPILER_SETTINGS)) is not None:
            compiler.deterministic = bool(deterministic)  # type: ignore[attr-defined]
