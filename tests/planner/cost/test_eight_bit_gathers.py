"""Tensor parallelism in fp8: what is gathered, in bytes per element."""

from dataclasses import replace

import pytest
import torch

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.cost import load_constants
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.problem import ModelShape, SoftwareProfile, StepLayout, Workload, WorkloadColumns
from hlat.planner.problem.devices import cluster_device

H100 = cluster_device(parse_cluster("p5.48xlarge:1", load_catalog()))
SHAPE = ModelShape(32, 8192, 64, 8, 128, 28672, 128256)
LAYOUT = StepLayout(8, 1, 1, 1, 1, 1, 1, 8, 8192, sequence_parallel=True, recompute="none")


def tensor_seconds(layout=LAYOUT, **software):
    profile = SoftwareProfile(eight_bit=True, **software)
    constants = load_constants().with_values({("hop", "all"): 0.0, ("collective", "all"): 0.0})
    return comm_times(WorkloadColumns([Workload(SHAPE, layout, profile, H100)]), constants).tensor[0]


def test_gathers_in_fp8_send_one_byte_of_three():
    """A gather and a scatter: torch's fp8 element and its 16-bit one instead of two 16-bit ones."""
    narrow, wide = (torch.empty(0, dtype=dtype).element_size() for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    ratio = tensor_seconds(transformer_engine=True) / tensor_seconds()
    assert ratio == pytest.approx((narrow + wide) / (wide + wide))


def test_sums_of_whole_activations_stay_in_sixteen_bits():
    whole = replace(LAYOUT, sequence_parallel=False)
    assert tensor_seconds(whole, transformer_engine=True) == tensor_seconds(whole)
