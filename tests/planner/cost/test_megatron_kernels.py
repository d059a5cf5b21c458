"""Megatron-LM's softmax for causal masks, and recomputation that repeats a block to its end."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.cost import load_constants, step_times
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.problem import (
    MATERIALIZED_SCORES,
    ModelShape,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
)
from hlat.planner.problem.devices import cluster_device

A100 = cluster_device(parse_cluster("p4d.24xlarge:1", load_catalog()))
SHAPE = ModelShape(24, 2048, 16, 16, 128, 8192, 51200, gated=False)
LAYOUT = StepLayout(8, 1, 1, 1, 1, 0, 8, 64, 1024, sequence_parallel=False, recompute="full")


def columns(layout=LAYOUT, **software):
    profile = SoftwareProfile(attention=MATERIALIZED_SCORES, eager=False, **software)
    return WorkloadColumns([Workload(SHAPE, layout, profile, A100)])


def test_a_causal_softmax_reads_what_the_mask_leaves():
    """Scores forward, probabilities and their gradients backward: 2 bytes each; all are written."""
    length, constants = LAYOUT.sequence, load_constants()
    masked = 1 - float(torch.ones(length, length).tril().mean())
    whole, causal = (compute_times(columns(causal_softmax=one), constants) for one in (False, True))
    scores = LAYOUT.micro_batch * SHAPE.heads / LAYOUT.tensor * length**2
    rate = A100.memory_rate * constants.values["memory", "all"]
    # The model takes half for the lower triangle, of which the diagonal is 1 / length.
    for name, tensors in (("attention_forward", 1), ("attention_backward", 2)):
        spared = getattr(whole, name)[0] - getattr(causal, name)[0]
        assert spared == pytest.approx(tensors * 2 * masked * scores / rate, rel=2 / length)


class Sum(torch.autograd.Function):
    """An all-reduce of the tensor axis: a sum forward, nothing backward."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Sum.calls += 1
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("whole", [True, False])
def test_recomputation_repeats_as_many_all_reduces_as_torch_checkpoints(whole):
    """Reentrant checkpoints, which Megatron-LM's and DeepSpeed's are made after, run a block to its end."""
    attention, feed_forward = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def block(x):
        return Sum.apply(feed_forward(Sum.apply(attention(x))))

    x = torch.ones(1, 4, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=whole)
    Sum.calls = 0
    out.sum().backward()
    workloads, constants = columns(recomputes_sums=whole), load_constants()
    spent = step_times(workloads, constants).recomputed[0]
    apart = step_times(columns(replace(LAYOUT, recompute="none")), constants)
    again = SHAPE.layers * LAYOUT.global_batch / LAYOUT.micro_batch * constants.values["recomputed", "ampere"]
    each = comm_times(workloads, constants).tensor[0]
    # All of a forward pass has two sums.
    assert spent / again == pytest.approx(apart.forward[0] - (2 - Sum.calls) * each)
