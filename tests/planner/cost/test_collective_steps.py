"""Collectives whose algorithm is chosen by the size of the message, as AWS documents them for Trainium2."""

from dataclasses import replace

import pytest

from hlat.planner.cost.calibration import load_constants
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.problem.devices import cluster_device
from hlat.planner.problem.workload import (
    ModelShape,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    rank_weights,
)
from tests.support.planner.requests import request_for

SHAPE = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
MB = 1e6


def times(device, tensor, tokens, data=1, zero=1):
    layout = StepLayout(tensor, 1, 1, data, 1, zero, 1, data, tokens, True, "none")
    return comm_times(WorkloadColumns([Workload(SHAPE, layout, SoftwareProfile(), device)]), load_constants())


def device_of(cluster):
    return cluster_device(request_for("llama-2-7b", cluster).cluster)


@pytest.fixture(scope="module")
def trn2():
    return device_of("trn2.48xlarge:4")


@pytest.mark.parametrize(
    ("tensor", "tokens", "steps"),
    [
        # message of tokens x 4,096 in bf16; a chip has 4 devices
        (64, 100, 2),  # 0.8 MB: to all chips, then inside the chip
        (64, 1000, 5),  # 8.2 MB: 16 chips are four doublings, then inside the chip
        (16, 1000, 3),  # four chips
        (64, 8192, 32),  # 67 MB: a ring of every second device
        (8, 8192, 4),
        (2, 8192, 1),  # half a chip: a ring of two
        (4, 100, 2),
    ],
)
def test_the_steps_of_a_collective_are_those_of_the_documentation(trn2, tensor, tokens, steps):
    """The difference of two latencies of a step is the number of steps: four times, in two gathers and two scatters.

    An all-reduce, ``tensor``, is a gather and a scatter.
    """
    slower = replace(trn2, hop=trn2.hop + 1e-6)
    added = float((times(slower, tensor, tokens).tensor - times(trn2, tensor, tokens).tensor)[0])
    assert added == pytest.approx(2 * steps * 1e-6, rel=1e-6)


def workload(device):
    return Workload(SHAPE, StepLayout(1, 1, 1, 1, 1, 1, 1, 1, 1, True, "none"), SoftwareProfile(), device)


def test_gradients_are_exchanged_between_instances_first(trn2):
    """With TP 4, 16 replicas of each of 4 instances: a ring of 3 steps between, and one of 15 inside."""
    far, near = replace(trn2, network_hop=1.0), replace(trn2, hop=1.0)
    base = times(trn2, 4, 4096, data=64, zero=0)
    for slower, steps, old in ((far, 3, trn2.network_hop), (near, 15, trn2.hop)):
        added = float((times(slower, 4, 4096, data=64, zero=0).reduce - base.reduce)[0])
        assert added == pytest.approx(steps * (1 - old), rel=1e-6)


def test_other_machines_keep_the_ring_of_their_constants():
    """Their latency is that of the constant, for any size."""
    h100 = device_of("h100:16")
    hop = float(load_constants().column("hop", WorkloadColumns([workload(h100)]))[0])
    constants = load_constants().with_values({("hop", "all"): 0.0})
    for tokens in (100, 8192):
        layout = StepLayout(8, 1, 1, 1, 1, 1, 1, 1, tokens, True, "none")
        columns = WorkloadColumns([Workload(SHAPE, layout, SoftwareProfile(), h100)])
        removed = float((comm_times(columns, load_constants()).tensor - comm_times(columns, constants).tensor)[0])
        assert removed == pytest.approx(2 * 7 * hop, rel=1e-6)


@pytest.mark.parametrize(
    ("zero", "calls"),
    [
        (3, 33),  # 32 blocks, and embedding with head
        (1, 33),
        (0, 1),
    ],
)
def test_a_gather_over_instances_is_a_ring_of_all_ranks(zero, calls):
    """By hand: 128 ranks on 16 instances of 8 take 16 x 7 steps over NVLink and 15 over the network, in each call."""
    h100, ones = device_of("h100:16"), {"link": 1.0, "network": 1.0}
    layout = StepLayout(1, 1, 1, 128, 1, zero, 1, 128, 4096, True, "none")
    columns = WorkloadColumns([Workload(SHAPE, layout, SoftwareProfile(), h100)])
    constants = load_constants().with_values({(name, "all"): value for name, value in ones.items()})
    constants = constants.with_values({("hop", "all"): 3e-6, ("network_hop", "all"): 1e-5, ("collective", "all"): 2e-5})
    sent = 2 * float(rank_weights(columns)[0])
    seconds = calls * (2e-5 + 16 * 7 * 3e-6 + 15 * 1e-5) + 127 / 128 * sent / min(h100.link_rate, h100.network_rate)
    passage = sent / (h100.memory_rate * constants.values["passage", "all"])
    assert comm_times(columns, constants).gather[0] == pytest.approx(seconds + passage, rel=1e-9)


def test_replicas_gather_inside_an_instance_and_sum_shards_between_them():
    """By hand: shards of 1/8 of the gradients in 32 bits go around 16 instances, by an eighth of a network each."""
    h100 = device_of("h100:16")
    layout = StepLayout(1, 1, 1, 128, 1, 3, 1, 128, 4096, True, "none", replicas=16)
    columns = WorkloadColumns([Workload(SHAPE, layout, SoftwareProfile(), h100)])
    zeros = dict.fromkeys((("hop", "all"), ("network_hop", "all"), ("collective", "all")), 0.0)
    constants = load_constants().with_values(zeros | {("network", "all"): 1.0, ("passage", "all"): 1e30})
    alone = WorkloadColumns([Workload(SHAPE, replace(layout, data=8, replicas=1), SoftwareProfile(), h100)])
    found, inside = comm_times(columns, constants), comm_times(alone, constants)
    assert found.gather[0] == pytest.approx(inside.gather[0]) and inside.across[0] == 0
    shard = 4 * float(rank_weights(columns)[0]) / 8
    assert found.across[0] == pytest.approx(2 * 15 / 16 * shard / (h100.network_rate / 8), rel=1e-9)
