"""Loss, sums of gradients and odd vocabularies: what they cost is what plain programs move."""

from dataclasses import replace

import pytest
import torch

from hlat.hardware import load_catalog, parse_cluster
from hlat.model.loss import CrossEntropy
from hlat.planner.cost.calibration import load_constants
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.program import hlat_profile
from hlat.planner.problem.devices import cluster_device
from hlat.planner.problem.layouts import parse_layout
from hlat.planner.problem.workload import (
    FUSED_LOSS_BYTES,
    ModelShape,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    layer_weights,
)
from tests.support.planner.requests import request_for
from tests.support.planner.traffic import Traffic

TOKENS, ROWS = 24, 40
A100 = cluster_device(parse_cluster("p4d.24xlarge:1", load_catalog()))
GPT = ModelShape(12, 768, 12, 12, 64, 3072, 50304, gated=False)
NANO_GPT = StepLayout(1, 1, 1, 8, 1, 0, 12, 12 * 8 * 5, 1024, sequence_parallel=False, recompute="none")


@pytest.mark.parametrize(("fused", "cluster"), [(True, "h100:1"), (False, "v100-32gb:1")])
def test_the_loss_of_hlat_moves_what_its_operations_read_and_write(fused, cluster, monkeypatch):
    """Counted on a CPU, with its fused kernels, whose operators are those of GPUs too, and without them."""
    monkeypatch.setattr("hlat.model.loss.has_kernels", lambda logits: fused)
    logits, labels = torch.randn(TOKENS, ROWS, dtype=torch.bfloat16), torch.arange(TOKENS)
    with Traffic(logits.numel()) as traffic:
        CrossEntropy()(logits, labels, gradient=True)
    assert traffic.bytes == profile_of("llama-3-8b", cluster).loss_bytes * logits.numel()
    assert profile_of("llama-2-7b", "trn1.32xlarge:1").loss_bytes == FUSED_LOSS_BYTES


def profile_of(model, cluster):
    request = request_for(model, cluster)
    return hlat_profile(request, parse_layout("tp=8", request))


def times(shape=GPT, layout=NANO_GPT, **software):
    columns = WorkloadColumns([Workload(shape, layout, SoftwareProfile(**software), A100)])
    return columns, compute_times(columns, load_constants())


def test_the_first_gradient_of_torch_becomes_the_sum():
    """Autograd stores the first gradient as ``.grad``, and adds the following ones to it."""
    weight, passes = torch.nn.Parameter(torch.zeros(ROWS, dtype=torch.bfloat16)), 5

    def traffic_of(number):
        weight.grad = None
        with Traffic(ROWS) as traffic:
            for _ in range(number):
                (weight * 2).sum().backward()
        return traffic.bytes

    added = (traffic_of(passes) - passes * traffic_of(1)) / ROWS
    columns, kept = times(adds_apart=True, gradient_bytes=2)
    assert columns.micro_batches[0] == passes
    nothing = times(adds_apart=True, gradient_bytes=2, layout=replace(NANO_GPT, zero=3))[1]
    rate = float(columns.memory_rate[0]) * load_constants().values["memory", "all"]
    assert passes * (kept.backward[0] - nothing.backward[0]) == pytest.approx(added / rate * layer_weights(columns)[0])


@pytest.mark.parametrize(
    "layout",
    [
        replace(NANO_GPT, global_batch=12 * 8),  # one micro-batch: nothing to add to
        replace(NANO_GPT, zero=3),  # shards are added
    ],
)
def test_without_whole_sums_no_kernel_adds_gradients(layout):
    for name in ("backward", "head"):
        apart, inside = (times(layout=layout, adds_apart=one)[1] for one in (True, False))
        assert getattr(apart, name) == getattr(inside, name)


def test_a_compiler_pads_odd_rows():
    odd = replace(GPT, vocab=50257)
    eager, compiled = (times(odd, pads_rows=one)[1].head / times(GPT)[1].head for one in (False, True))
    assert eager > 2
    assert compiled < 1.01, "the last tile is not full"
