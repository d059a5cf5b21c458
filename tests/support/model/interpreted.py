"""Run tests of the operators with their implementations in Triton, on CPU tensors, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.support.model.interpreted ARGUMENTS OF PYTEST

The variable has to be set before Triton is imported, so this is a program of its own.
"""

import sys
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from hlat.model.kernels import library as kernels
from hlat.model.kernels import operations_triton
from hlat.model.loss import head_loss

_convert = interpreter._convert_float
_patch_tensor = interpreter._patch_lang_tensor


def _round_to_nearest(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: Any) -> np.ndarray:
    """Round fp32 to bf16 as a GPU does: the interpreter cuts the last bits off. bf16 is stored as integers."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(values, source, target, mode)
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()


def _with_index(tensor: Any, scope: Any) -> None:
    """Let tensors of one element bound a loop: Triton 3.6 converts their arrays in a way that numpy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # operands have infinities and NaN
    interpreter._convert_float, interpreter._patch_lang_tensor = _round_to_nearest, _with_index
    # Small tensors that take several programs and blocks.
    operations_triton._TILE, operations_triton._LOSS_BLOCK, operations_triton._PARTS = 64, 128, 3
    assert callable(head_loss), "its module, and those it imports, have registered the operators"
    library = torch.library.Library("hlat", "IMPL")
    for name, results in kernels.RESULTS.items():
        library.impl(name, kernels.in_triton(name, results), "CPU", allow_override=True)
    raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
