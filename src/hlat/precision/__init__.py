"""What is stored and computed in which dtype.

| mode  | weights | matrix products | gradients, accumulation | optimizer moments |
|-------|---------|-----------------|-------------------------|-------------------|
| fp32  | fp32    | fp32            | fp32                    | fp32              |
| mixed | fp32    | bf16            | fp32                    | fp32              |

Norm statistics, softmax, RoPE tables and the loss are fp32 in both.
"""

from hlat.precision.modes import autocast, compute_dtype

__all__ = ["autocast", "compute_dtype"]
