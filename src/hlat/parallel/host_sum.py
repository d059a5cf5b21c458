"""Sums of losses on the CPU, the same on every device type: some devices have no float64.

losses of micro-batches, fp32 on the device --one copy--> CPU --exact sum, one rounding--> float64
"""

import math
from collections.abc import Sequence

import torch


def sum_on_host(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum scalars exactly and round once: float64, on the CPU. The order of the scalars does not matter.

    Args:
        losses: scalars on one device; none gives 0.
    """
    values = torch.stack(list(losses)).tolist() if losses else []
    return torch.tensor(math.fsum(values) if all(map(math.isfinite, values)) else sum(values), dtype=torch.float64)
