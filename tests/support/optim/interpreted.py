"""Compare the Triton kernels with the plain ones in Triton's interpreter, on CPU tensors.

    TRITON_INTERPRET=1 python -m tests.support.optim.interpreted

The variable has to be set before Triton is imported, so this is a program of its own. It prints a line for each case.
"""

import itertools
import json

import numpy as np
import torch

from hlat.optim import adamw_triton
from hlat.optim.adamw_reference import ROUNDINGS, update
from tests.optim.test_kernels import GRADIENTS, KEYS, operands, state

SHAPES = ((0, 5), (1, 1), (7, 3), (5, 1500), (2, 1024), (3, 1025))


def main() -> None:
    np.seterr(all="ignore")  # operands have every exponent, infinities and NaN
    for rounding, gradient, shape in itertools.product(ROUNDINGS, GRADIENTS, SHAPES):
        plain, interpreted = (operands(rounding, gradient, *shape, seed=sum(shape)) for _ in range(2))
        for step in range(2):
            update([plain], KEYS + step, rounding)
            adamw_triton.update([interpreted], KEYS + step, rounding)
        different = [int((mine != theirs).sum()) for mine, theirs in zip(state(plain), state(interpreted), strict=True)]
        print(json.dumps({"case": [rounding, str(gradient), *shape], "different": different}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
