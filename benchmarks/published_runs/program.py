"""Other training programs than hlat: what their steps do otherwise, and their times by the planner's own formulas.

    row -> RunWorkload (more fields than hlat's) -> WorkloadColumns -> run_steps -> the formulas, with RunProgram

hlat's plans have none of these fields and none of these branches (planner/cost/program.py).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.planner.cost.calibration import Constants
from hlat.planner.cost.program import Program, balanced_layers
from hlat.planner.cost.step_time import StepTimes, step_times
from hlat.planner.problem.workload import Column, SoftwareProfile, StepLayout, Workload, WorkloadColumns, block_products

COMPOSED_LOSS_BYTES = 52.0
"""Memory traffic per logit of a loss that is composed of torch's operations on fp32 logits, forward and backward.

Megatron-LM, core/tensor_parallel/cross_entropy.py: conversion from 16 bits 6 bytes, largest logit 4, subtraction,
exponentials and division 8 each, their sum 4; product with the incoming gradient 8, conversion 6.
torch.nn.functional.cross_entropy on fp32 logits moves between 40 and that: its softmax reads rows that are too long for
a processor more than once.
"""
EXPOSED_TENSOR = 0.5
"""Share of overlapped tensor-parallel communication that remains exposed: the first chunk of a gather and the last of a
scatter have nothing to overlap with, and communication kernels take processors from products."""
_CAST = 2 + 1 + 1  # bytes per element: read in 16 bits, written in 8 bits as is and transposed
_TRANSPOSITION = 1 + 1


@dataclass(frozen=True)
class RunLayout(StepLayout):
    """Layout of a published step.

    Attributes:
        recomputed_layers: share of the layers that ``full`` recomputation repeats.
        recomputed_products: share of the work of products that it repeats in these layers; less than 1 if results are
            kept.
        recomputed_attention: 1 if it repeats attention, 0 if its result is kept.
    """

    recomputed_layers: float = 1.0
    recomputed_products: float = 1.0
    recomputed_attention: float = 1.0


@dataclass(frozen=True)
class RunSoftware(SoftwareProfile):
    """Properties of the training programs of published runs.

    Attributes:
        overlaps_tensor: True if tensor-parallel communication overlaps with its matrix products.
        overlaps_sums: True if what is sent once per step (sums of gradients) overlaps with passes too.
        overlaps_context: True if the exchange of keys and values overlaps with attention.
        transformer_engine: True if fp8 is Transformer Engine's: casts are fused, and tensor ranks gather in fp8.
        balances_stages: True if the last stages of a pipeline have fewer layers, since they have the head.
        divides_head: True if the head is divided over all stages of a pipeline (vocabulary parallelism).
        recomputes_sums: True if recomputation of a block repeats its last all-reduce, whose result is not needed.
    """

    overlaps_tensor: bool = False
    overlaps_sums: bool = True
    overlaps_context: bool = False
    transformer_engine: bool = False
    balances_stages: bool = False
    divides_head: bool = False
    recomputes_sums: bool = False


@dataclass(frozen=True)
class RunWorkload(Workload):
    """One step of a published run."""

    layout: RunLayout
    software: RunSoftware


class RunProgram(Program):
    """Choices of the programs of published runs, by the fields above."""

    def cast_times(self, columns: WorkloadColumns, constants: Constants) -> tuple[Column, Column]:
        """Seconds of a layer's casts to 8 bits, forward and backward.

        Transformer Engine casts and transposes in one kernel, or in the norm in front.
        """
        engine = (columns.transformer_engine > 0) & (columns.eight_bit > 0)
        rate = columns.memory_rate * constants.column("memory", columns)
        fused = (moved / rate for moved in engine_bytes(columns))
        forward, backward = (
            np.where(engine, one, other)
            for one, other in zip(fused, super().cast_times(columns, constants), strict=True)
        )
        return forward, backward

    def tensor_share(self, columns: WorkloadColumns) -> Column | float:
        """Bytes that tensor ranks gather and scatter, relative to 16 bits per element.

        Transformer Engine gathers what fp8 products read in fp8, inputs forward and gradients backward; it scatters in
        16 bits (pytorch/distributed.py, gather_along_first_dim).
        """
        narrow = (columns.transformer_engine > 0) & (columns.sequence_parallel > 0)
        return np.where(narrow, 3 / 4, 1.0)  # mean of a gather and a scatter

    def exposed_tensor(self, columns: WorkloadColumns) -> Column | float:
        """Share of the tensor axis' communication that no product hides."""
        return np.where(columns.overlaps_tensor > 0, EXPOSED_TENSOR, 1.0)

    def context_waits(
        self, columns: WorkloadColumns, once: Column, attention_forward: Column, attention_backward: Column
    ) -> tuple[Column, Column]:
        """Exposed time of these exchanges in a layer, forward and backward.

        A ring (Liu et al. 2023, arXiv 2310.01889) hides each of its c - 1 messages behind one of c pieces of attention;
        its backward pass carries keys, values and their gradients.
        """
        rings, hidden = columns.overlaps_context > 0, (columns.context - 1) / columns.context
        forward, backward = super().context_waits(columns, once, attention_forward, attention_backward)
        return (
            np.where(rings, np.maximum(0.0, once - hidden * attention_forward), forward),
            np.where(rings, np.maximum(0.0, 2 * once - hidden * attention_backward), backward),
        )

    def repeated(
        self, columns: WorkloadColumns, forward: Column, sums: Column, products: Column, attention: Column, last: Column
    ) -> Column:
        """Seconds of a layer's forward pass that full recomputation repeats, where it keeps some results or layers."""
        kept = (1 - columns.recomputed_products) * products + (1 - columns.recomputed_attention) * attention
        skipped = np.where(columns.recomputes_sums > 0, 0.0, sums / 2)
        return columns.recomputed_layers * (forward - skipped - kept - last)

    def hides_sums(self, columns: WorkloadColumns) -> NDArray[np.bool_]:
        """True where passes hide what the data axis exchanges once per step."""
        return super().hides_sums(columns) & (columns.overlaps_sums > 0)

    def slowest_stage(
        self, columns: WorkloadColumns, layer: Column, head: Column, embedding: Column
    ) -> tuple[Column, Column]:
        """Layers of the pipeline rank with the most, and seconds of the slowest one for a micro-batch."""
        balanced = (columns.balances_stages > 0) & (columns.pipeline > 1)
        pairs = zip(balanced_layers(columns, head / layer), even_layers(columns), strict=True)
        largest, last = (np.where(balanced, ours, even) for ours, even in pairs)
        # Where the last rank has fewer layers because of the head, so has the first; balanced stages look at the head.
        first = np.where(balanced, largest, last) * layer + embedding
        others = np.maximum(np.maximum(first, last * layer + head), largest * layer)
        # Vocabulary parallelism divides both over the stages.
        divided = largest * layer + (head + embedding) / columns.pipeline
        several = np.where(columns.divides_head > 0, divided, others)
        return largest, np.where(columns.pipeline > 1, several, largest * layer + head + embedding)


RUN_PROGRAM = RunProgram()


def run_steps(columns: WorkloadColumns, constants: Constants | None = None) -> StepTimes:
    """Predict the step time of published runs.

    Args:
        columns: workloads of the runs.
        constants: constants of the time model; None for those that plans use.
    """
    return step_times(columns, constants, RUN_PROGRAM)


def even_layers(columns: WorkloadColumns) -> tuple[Column, Column]:
    """Layers of the pipeline rank with the most, and of the last one.

    If the layers do not divide evenly, the first and the last rank have fewer, since they also have embedding and head.
    """
    largest = np.ceil(columns.layers / columns.pipeline)
    even = columns.layers % columns.pipeline == 0
    without_ends = (columns.layers + 2) % columns.pipeline == 0
    last = np.where(
        even, largest, np.where(without_ends, largest - 1, np.maximum(1.0, np.floor(columns.layers / columns.pipeline)))
    )
    return largest, last


def engine_bytes(columns: WorkloadColumns) -> tuple[Column, Column]:
    """Memory traffic of Transformer Engine's casts of one layer, forward and backward.

    Forward, norms write fp8 themselves: only the transposition of their results is left. Inputs of the output and of
    the down projection are cast. Backward, so are the gradients of all results; with sequence parallelism those of the
    two residual sums in shards, which are gathered in fp8 and then transposed. Weights are cast once per step.
    Source: transformer_engine/pytorch/module, layernorm_linear.py, linear.py, and grad_output_preprocess in base.py.
    """
    qkv, output, gate_and_up, down = block_products(columns)
    forward = 2 * _TRANSPOSITION * columns.hidden + _CAST * (output[1] + down[1])
    in_shards = (_CAST - 1) / columns.tensor + _TRANSPOSITION
    of_sums = np.where(columns.sequence_parallel > 0, in_shards, _CAST)
    backward = 2 * of_sums * columns.hidden + _CAST * (qkv[0] + gate_and_up[0])
    return columns.tokens * forward, columns.tokens * backward
