"""The training program, as far as the time of a step depends on how it is written: hlat's way.

    request, candidate -> kernels of attention and loss, overlap, dtypes of messages -> SoftwareProfile (one workload)
    columns, constants -> Program -> kernels, casts, exchanged bytes and waiting of one step -> the formulas

Predictions are of hlat. The constants are fitted to runs of other programs too: benchmarks/published_runs/program.py
derives theirs from ``Program``, and gives it to the same formulas.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hlat.planner.cost.calibration import Constants
from hlat.planner.memory import has_fused_kernels
from hlat.planner.problem.devices import PlannedExecution, planned_execution
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import (
    CHIP_FAMILIES,
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FUSED_LOSS_BYTES,
    MATERIALIZED_SCORES,
    Column,
    SoftwareProfile,
    WorkloadColumns,
    block_products,
)
from hlat.precision import MODES
from hlat.runtime.backend.base import AttentionKernel


def hlat_profile(request: PlanRequest, candidate: Candidate) -> SoftwareProfile:
    """Profile of hlat on the request's cluster in this layout (docs/limits.md, docs/parallelism.md)."""
    chip, execution = request.cluster.chip, planned_execution(request, candidate)
    family, has_kernels = chip.family or "measured", has_fused_kernels(chip)
    return _software_profile(family, execution, has_kernels, candidate.zero > 0, request.mode)


@dataclass(frozen=True)
class AttentionPrice:
    """Time of an attention kernel, by a kernel that published runs were fitted to."""

    kernel: int  # one of the four of SoftwareProfile.attention
    forward: float = 1.0  # time of the passes, relative to that kernel
    backward: float = 1.0
    slowed: float = 1.0  # time of the backward pass in deterministic mode, relative to it


_ATTENTION_PRICES = {
    # name of a kernel (``AttentionKernel`` of runtime/backend/base.py) -> its price. One H100, causal, heads of 128,
    # 8,192 tokens, forward and backward in TFLOP/s (flash-attention, pull request 1893): cuDNN 566, 470;
    # FlashAttention 2 306, and 166 deterministic; 3 660, 575, and 474 deterministic. The constants make 361, 290 of
    # FlashAttention 2 and
    # 561, 450 of 3. Nobody has published how much determinism costs on other chips: the ratio is taken for all.
    "cudnn_attention": AttentionPrice(FLASH_ATTENTION_3),
    "flash_attention": AttentionPrice(FLASH_ATTENTION_2, slowed=1.75),
    "flash_attention_3": AttentionPrice(FLASH_ATTENTION_3, forward=0.85, backward=0.78, slowed=0.95),
    # PyTorch blog, FlexAttention (2024-08-07): 90 % of FlashAttention 2 forward, 85 % backward, deterministic as it is.
    "flex_attention within documents": AttentionPrice(FLASH_ATTENTION_2, forward=1 / 0.9, backward=1 / 0.85),
    # Memory-efficient attention of xFormers, priced as FlashAttention 1; what its deterministic mode costs is unknown.
    "efficient_attention": AttentionPrice(FLASH_ATTENTION_1),
    "math": AttentionPrice(MATERIALIZED_SCORES),
}


def _attention_price(kernel: AttentionKernel | None, family: str) -> AttentionPrice:
    # A kernel without a price, as of a chip's compiler, has that of the kernels of the family's time.
    eager = FLASH_ATTENTION_1 if CHIP_FAMILIES[family].first_kernels else FLASH_ATTENTION_2
    usual = AttentionPrice(FLASH_ATTENTION_3 if CHIP_FAMILIES[family].compiled else eager)
    return usual if kernel is None else _ATTENTION_PRICES.get(kernel.name, usual)


_LOSS_BYTES = 44.0
"""Memory traffic of hlat's loss per logit where no compiler and no kernel fuses it (model/loss.py): conversion to fp32
6 bytes, largest logit 4, subtraction, exponentials and their product with a factor 8 each, sum 4, conversion 6."""
_KERNEL_LOSS_BYTES = 6.0
"""Memory traffic of its kernels (model/kernels/operations_triton.py): they read logits twice and overwrite them."""


@lru_cache
def _software_profile(
    family: str, execution: PlannedExecution, has_kernels: bool, zero: bool, mode: str
) -> SoftwareProfile:
    attention, compiled = execution.attention, CHIP_FAMILIES[family].compiled
    price, slowed = _attention_price(attention, family), attention is not None and attention.slowed
    return SoftwareProfile(
        attention=price.kernel,
        attention_forward=price.forward,
        attention_backward=price.slowed if slowed else price.backward,
        # Without kernels, norms and rotations are sequences of torch's operations (model/pointwise.py).
        composed=not compiled and not execution.compiled and not has_kernels,
        eager=not compiled and not execution.compiled,
        # The all-reduce of ZeRO 0 does not overlap with computation.
        overlaps_data=zero,
        eight_bit=mode == "fp8",
        # In units of 16-bit products: for 32-bit products, rates are halved instead (problem/devices.py).
        gradient_bytes=MODES[mode].reduction.itemsize * 2 // MODES[mode].compute.itemsize,
        loss_bytes=FUSED_LOSS_BYTES if compiled else _KERNEL_LOSS_BYTES if has_kernels else _LOSS_BYTES,
        # Only blocks are compiled on GPUs, not the head.
        pads_rows=compiled,
        adds_apart=not compiled,
    )


class Program:
    """Choices of hlat that cost time; a method for each that another program makes otherwise."""

    def cast_times(self, columns: WorkloadColumns, constants: Constants) -> tuple[Column, Column]:
        """Seconds of a layer's casts to 8 bits, forward and backward; 0 without 8-bit products."""
        # Casts are passes of their own over 16-bit tensors, read once and written twice: the gradient of a weight needs
        # input and gradient transposed.
        rate = columns.memory_rate * constants.column("memory", columns)
        inputs = sum(columns.tokens * width for _, width in block_products(columns))
        once = np.where(columns.eight_bit > 0, 3 * inputs / rate * constants.column("casts", columns), 0.0)
        return once, 2 * once

    def tensor_share(self, columns: WorkloadColumns) -> Column | float:
        """Bytes that tensor ranks gather and scatter, relative to 16 bits per element."""
        return 1.0

    def exposed_tensor(self, columns: WorkloadColumns) -> Column | float:
        """Share of the tensor axis' communication that no product hides."""
        return 1.0

    def context_waits(
        self, columns: WorkloadColumns, once: Column, attention_forward: Column, attention_backward: Column
    ) -> tuple[Column, Column]:
        """Exposed time of ``once`` per exchange in a layer, forward and backward."""
        # A gather (Llama 3 herd, arXiv 2407.21783, section 3.3.2) is waited for. Its backward pass scatters the
        # gradients, and gathers again what recomputation has freed.
        return once, np.where(columns.recompute > 0, 2.0, 1.0) * once

    def repeated(
        self, columns: WorkloadColumns, forward: Column, sums: Column, products: Column, attention: Column, last: Column
    ) -> Column:
        """Seconds of a layer's forward pass that full recomputation repeats."""
        # The results of the second all-reduce of ``sums`` and of the last product are not needed again.
        return forward - sums / 2 - last

    def hides_sums(self, columns: WorkloadColumns) -> NDArray[np.bool_]:
        """True where passes hide what the data axis exchanges once per step."""
        hides: NDArray[np.bool_] = columns.overlaps_data > 0
        return hides

    def slowest_stage(
        self, columns: WorkloadColumns, layer: Column, head: Column, embedding: Column
    ) -> tuple[Column, Column]:
        """Layers of the pipeline rank with the most, and seconds of the slowest one for a micro-batch."""
        several = columns.pipeline > 1
        largest, last = balanced_layers(columns, head / layer)
        largest = np.where(several, largest, columns.layers)
        slowest = np.maximum(largest * layer + embedding, last * layer + head)
        return largest, np.where(several, slowest, largest * layer + head + embedding)


HLAT = Program()


def balanced_layers(columns: WorkloadColumns, head: Column) -> tuple[Column, Column]:
    """Layers of the ranks before the last one, and of the last one, whose longest time is least.

    ``head`` is the head's time in layers. ``hlat.parallel.stages`` also looks at memory, and at each stage of a rank;
    the simulation uses its split.
    """
    ranks, fewest = columns.pipeline, columns.virtual

    def split(most: Column) -> tuple[Column, Column, Column]:
        last = np.maximum(fewest, columns.layers - (ranks - 1) * most)
        return most, last, np.maximum(most, last + head)

    mean = np.maximum(1.0, (columns.layers + head) / ranks)
    (few, last_of_few, longest), (many, last_of_many, other) = split(np.floor(mean)), split(np.ceil(mean))
    # Fewer layers than the mean leave the rest to the last rank; more than all of them are not there.
    many = np.minimum(many, np.ceil((columns.layers - fewest) / np.maximum(ranks - 1, 1)))
    better = longest <= other
    return np.where(better, few, many), np.where(better, last_of_few, last_of_many)
