"""Casts of Transformer Engine: bytes of the tensors that its kernels read and write, listed one by one."""

from dataclasses import replace

import pytest
import torch

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.cost import load_constants
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.eight_bit_casts import cast_times
from hlat.planner.problem import ModelShape, SoftwareProfile, StepLayout, Workload, WorkloadColumns
from hlat.planner.problem.devices import cluster_device

H100 = cluster_device(parse_cluster("p5.48xlarge:1", load_catalog()))
SHAPE = ModelShape(4, 1024, 16, 4, 64, 2816, 32000)
LAYOUT = StepLayout(2, 1, 1, 4, 1, 1, 1, 64, 512, sequence_parallel=True, recompute="none")
WIDE, NARROW = (torch.empty(0, dtype=one).element_size() for one in (torch.bfloat16, torch.float8_e4m3fn))


def columns(layout=LAYOUT, **software):
    return WorkloadColumns([Workload(SHAPE, layout, SoftwareProfile(**software), H100)])


def cast(*shape):
    """A tensor in 16 bits, written in 8 bits as is and transposed."""
    return torch.Size(shape).numel() * (WIDE + 2 * NARROW)


def transposed(*shape):
    return torch.Size(shape).numel() * 2 * NARROW


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_casts_of_a_layer_are_those_of_its_tensors(sequence_parallel):
    tokens, ranks = 512, 2
    queries, keys, hidden, intermediate = 1024 // ranks, 4 * 64 // ranks, 1024, 2816 // ranks
    forward = [
        transposed(tokens, hidden),  # of the norm in front of attention
        cast(tokens, queries),
        transposed(tokens, hidden),  # of the norm in front of the feed-forward block
        cast(tokens, intermediate),
    ]
    if sequence_parallel:
        shard = torch.Size((tokens // ranks, hidden)).numel()
        of_sum = shard * (WIDE + NARROW) + transposed(tokens, hidden)  # cast, gathered, transposed
    else:
        of_sum = cast(tokens, hidden)
    backward = [of_sum, cast(tokens, 2 * intermediate), of_sum, cast(tokens, queries + 2 * keys)]
    layout = replace(LAYOUT, sequence_parallel=sequence_parallel)
    found = cast_times(columns(layout, eight_bit=True, transformer_engine=True), load_constants())
    rate = H100.memory_rate * load_constants().values["memory", "all"]
    for seconds, tensors in zip(found, (forward, backward), strict=True):
        assert seconds[0] == pytest.approx(sum(tensors) / rate)


def test_only_products_in_fp8_have_casts_and_fused_ones_are_cheaper():
    sixteen, separate, fused = (
        compute_times(columns(**software), load_constants())
        for software in ({}, {"eight_bit": True}, {"eight_bit": True, "transformer_engine": True})
    )
    assert fused.products[0] < separate.products[0]
    assert [float(one[0]) for one in cast_times(columns(), load_constants())] == [0.0, 0.0]
    assert compute_times(columns(transformer_engine=True), load_constants()).products[0] == sixteen.products[0]
