"""Memory of a rank: estimate against exact count, published measurements, and monotonicity."""

import numpy as np
import pytest

from hlat.parallel.stages.stage_layers import stage_layer_counts
from hlat.planner.memory import estimate_rank_memory, rank_memory
from hlat.planner.problem.layouts import candidates, parse_layout
from tests.support.planner.requests import request_for

GIB = 1 << 30


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-70b"])
@pytest.mark.parametrize("cluster", ["trn1.32xlarge:8", "h100:8"])
def test_the_estimate_is_within_2_percent_of_the_exact_count(model, cluster):
    """Apart from layers that divide unevenly and FSDP's padding; the sampled layouts have even degrees."""
    request = request_for(model, cluster)
    auto = [candidate for candidate in candidates(request) if candidate.parallel.gather_again == "auto"]
    hybrid = [candidate for candidate in auto if candidate.replicas > 1]
    some = [candidate for candidate in auto if candidate.replicas == 1][::97] + hybrid[::37]
    assert len(some) > 10
    for candidate in some:
        for rank in (0, candidate.pipeline - 1):
            fast, exact = estimate_rank_memory(request, candidate, rank), rank_memory(request, candidate, rank)
            layers = -(-request.model.layers // candidate.pipeline)
            # The split by cost may give the first or last stage a layer more or less than an even split.
            slack = 0.02 + (1.5 / layers if candidate.pipeline > 1 else 0.0)
            assert fast.total == pytest.approx(exact.total, rel=slack), candidate


def test_state_shrinks_with_shards_as_measured_by_mlperf():
    """MLPerf Training v5.0, 405B on H100: max_memory_usage (58.8, 52.5 GiB, ...) is linear in 12 / shards, as here."""
    totals = []
    shards = (4, 8, 16, 32)
    for data in shards:
        request = request_for("llama-3-405b", f"h100:{data * 64 // 8}", sequence=8192, global_batch=256)
        candidate = parse_layout("tp=8,pp=8,recompute=full", request)
        totals.append(rank_memory(request, candidate, 0).optimizer + rank_memory(request, candidate, 0).parameters)
    slope, intercept = np.polyfit([1 / count for count in shards], totals, 1)
    residual = np.array(totals) - (slope / np.array(shards) + intercept)
    assert np.abs(residual).max() / totals[0] < 1e-3
    # 12 bytes per parameter of the rank: fp32 weights and two moments.
    parameters = rank_memory(request, candidate, 0).gradients / 4
    assert slope == pytest.approx(12 * parameters, rel=0.01)


def test_memory_grows_with_less_sharding_and_recomputation_and_larger_micro_batches():
    request = request_for("llama-2-7b", "a100-80gb:2", global_batch=64)

    def need(layout):
        candidate = parse_layout(layout, request)
        return max(rank_memory(request, candidate, rank).total for rank in range(candidate.pipeline))

    assert need("tp=2,zero=0") > need("tp=2,zero=1") > need("tp=2,zero=3")
    assert need("tp=2,recompute=none") > need("tp=2,recompute=selective") > need("tp=2,recompute=full")
    assert need("tp=2,micro_batch=2") > need("tp=2")
    assert need("tp=2") > need("tp=4") > need("tp=8")


def test_bytes_per_parameter_of_a_mode():
    """Weights, gradients and moments on one device: 16 bytes in mixed precision, 8 in bf16 (``hlat.precision``)."""
    for mode, each in (("mixed", 16), ("bf16-sr", 8), ("bf16-kahan", 10)):
        request = request_for("llama-2-7b", "tpu-v5p:1", precision=mode, global_batch=4)
        candidate = parse_layout("tp=4,zero=0", request)
        memory = rank_memory(request, candidate, 0)
        state = memory.parameters + memory.gradients + memory.optimizer
        count = memory.gradients / (4 if mode == "mixed" else 2)
        assert state == pytest.approx(each * count, rel=1e-3), mode


@pytest.mark.parametrize(
    ("model", "cluster", "shape", "layout", "gib"),
    [
        ("hlat-70b", "trn1.32xlarge:256", {}, "tp=32,pp=8,recompute=selective", 16),
        ("llama-3-405b", "h100:2048", {"sequence": 8192, "global_batch": 2048}, "tp=8,pp=16,recompute=selective", 80),
    ],
)
def test_published_layouts_fit_since_inputs_are_gathered_again(model, cluster, shape, layout, gib):
    """HLAT (arXiv 2404.10630) and Llama 3 (arXiv 2407.21783, table 4) ran in these layouts on these devices.

    What is freed is the formula of Korthikanti et al. 2022: two tensors of the model's width per token and layer of the
    passes in flight, and of the norms, which run again too, two fp32 scales per token of a shard.
    """
    request = request_for(model, cluster, **shape)
    again, keeping = (parse_layout(f"{layout},gather={choice}", request) for choice in ("auto", "never"))

    def peak(candidate):
        return max((rank_memory(request, candidate, rank) for rank in range(candidate.pipeline)), key=lambda m: m.total)

    assert peak(again).total < 0.96 * gib * GIB < peak(keeping).total
    step = again.step_shape(request)
    layers = stage_layer_counts(step)[0][0]
    of_pass = 2 * request.sequence * (request.model.hidden_size * 2 + 4 / again.tensor) * layers
    difference = rank_memory(request, keeping, 0).activations - rank_memory(request, again, 0).activations
    # With few micro-batches the peak is after the first backward pass, when gradients exist.
    passes = (again.pipeline, again.pipeline - 1)
    assert any(difference == pytest.approx(count * of_pass, rel=1e-3) for count in passes)
