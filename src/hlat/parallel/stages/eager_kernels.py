"""Properties of eager kernels in which devices differ, as far as memory depends on them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EagerKernels:
    """Properties of a device's eager kernels that decide temporary memory.

    Attributes:
        fused: norms, rotations, SwiGLU and loss are one pass each, without temporary tensors (``model.kernels``).
        masks: context-parallel attention to positions of other ranks builds masks.
        head_sums: the backward pass of attention has gradients by keys and values from each query head, in fp32.
        rounds: the embedding's gradient is accumulated in fp32 where its weights are bf16.
    """

    fused: bool = False
    masks: bool = False
    head_sums: bool = False
    rounds: bool = False


ACCELERATOR = EagerKernels()
"""Kernels of GPUs and other accelerators."""
