"""Libraries that compute matrix products, by the name that checkpoints and messages have of them.

``Backend.product_libraries`` says which of them a device type uses; ``hlat.model`` chooses one for each product in
training, and the peak of a device is measured with all of them, so that utilization is a share of the best one.
"""

from collections.abc import Callable

import torch

TORCH, ONEDNN = "torch", "oneDNN"


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` in fp32 on a CPU; torch itself calls this operator for packed weights only.

    Args:
        x: (..., in).
        weight: (out, in); it and x may be transposed views.
        bias: (out,).
    """
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    TORCH: torch.nn.functional.linear,
    ONEDNN: linear_by_onednn,
}
"""Functions of x (rows, in) and weight (out, in) that compute ``x @ weight.T``, by library."""
