"""Bytes: the fast estimate of a search and the exact count, the published series, and what must grow with what."""

import numpy as np
import pytest

from hlat.planner.memory import estimate_rank_memory, rank_memory
from hlat.planner.problem import candidates, parse_layout
from tests.support.planner.questions import question

GIB = 1 << 30


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-70b"])
@pytest.mark.parametrize("cluster", ["trn1.32xlarge:8", "h100:8"])
def test_the_estimate_of_a_search_is_the_exact_count_within_2_percent(model, cluster):
    """Up to layers that divide unevenly and FSDP's padding; searched layouts are those with even degrees."""
    asked = question(model, cluster)
    some = list(candidates(asked))[::97]
    assert len(some) > 10
    for one in some:
        for rank in (0, one.pipeline - 1):
            fast, exact = estimate_rank_memory(asked, one, rank), rank_memory(asked, one, rank)
            layers = -(-asked.model.layers // one.pipeline)
            # The split by cost may give an end one layer more or less than even.
            slack = 0.02 + (1.5 / layers if one.pipeline > 1 else 0.0)
            assert fast.total == pytest.approx(exact.total, rel=slack), one


def test_state_shrinks_with_shards_as_mlperf_measured_it():
    """MLPerf Training v5.0, 405B on H100: max_memory_usage (58.8, 52.5 GiB, ...) is linear in 12 / shards, as ours."""
    totals = []
    shards = (4, 8, 16, 32)
    for data in shards:
        asked = question("llama-3-405b", f"h100:{data * 64 // 8}", sequence=8192, global_batch=256)
        one = parse_layout("tp=8,pp=8,recompute=full", asked)
        totals.append(rank_memory(asked, one, 0).optimizer + rank_memory(asked, one, 0).parameters)
    slope, intercept = np.polyfit([1 / count for count in shards], totals, 1)
    residual = np.array(totals) - (slope / np.array(shards) + intercept)
    assert np.abs(residual).max() / totals[0] < 1e-3
    # 12 bytes per parameter of the rank: fp32 weights, and two moments.
    parameters = rank_memory(asked, one, 0).gradients / 4
    assert slope == pytest.approx(12 * parameters, rel=0.01)


def test_what_memory_grows_with():
    asked = question("llama-2-7b", "a100-80gb:2", global_batch=64)

    def need(layout):
        one = parse_layout(layout, asked)
        return max(rank_memory(asked, one, rank).total for rank in range(one.pipeline))

    assert need("tp=2,zero=0") > need("tp=2,zero=1") > need("tp=2,zero=3")
    assert need("tp=2,recompute=none") > need("tp=2,recompute=selective") > need("tp=2,recompute=full")
    assert need("tp=2,micro_batch=2") > need("tp=2")
    assert need("tp=2") > need("tp=4") > need("tp=8")


def test_bytes_per_parameter_of_a_mode():
    """Weights, gradients and moments of one device alone: 16 bytes in mixed precision, 8 in bf16 (precision room)."""
    for mode, each in (("mixed", 16), ("bf16-sr", 8), ("bf16-kahan", 10)):
        asked = question("llama-2-7b", "tpu-v5p:1", mode=mode, global_batch=4)
        one = parse_layout("tp=4,zero=0", asked)
        memory = rank_memory(asked, one, 0)
        state = memory.parameters + memory.gradients + memory.optimizer
        count = memory.gradients / (4 if mode == "mixed" else 2)
        assert state == pytest.approx(each * count, rel=1e-3), mode
