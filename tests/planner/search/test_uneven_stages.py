"""Layouts that fit only because the layers are divided unevenly over the stages are found."""

import pytest

from hlat.parallel.stages.stage_layers import stage_layer_counts
from hlat.planner import memory as exact_checks
from hlat.planner.memory import FURTHEST_ESTIMATE, ExactChecks, estimated_ranks, rank_memory
from hlat.planner.problem.layouts import candidates
from hlat.planner.search import USABLE_MEMORY_SHARE, fastest_layouts, search
from tests.support.planner.requests import request_for


@pytest.fixture(scope="module")
def request_of_seven():
    """Qwen 2.5 7B, whose embedding and head are as large as two layers and a half each, on seven cards of 24 GB."""
    return request_for("qwen2.5-7b", "rtx4090:7", global_batch=28, sequence=3072)


def limit(request):
    return USABLE_MEMORY_SHARE * request.cluster.memory_bytes


def test_no_even_division_fits_but_an_uneven_one_is_found(request_of_seven):
    most = limit(request_of_seven)
    even = [max(estimated_ranks(request_of_seven, layout)) for layout in candidates(request_of_seven)]
    assert min(even) > most
    found = search(request_of_seven)
    assert found.ranked and found.fitting >= len(found.ranked)
    for prediction in found.ranked:
        layout = prediction.candidate
        counts = stage_layer_counts(layout.step_shape(request_of_seven))
        assert len(set(counts)) > 1, "28 layers on 7 ranks, but not 4 on each"
        need = max(rank_memory(request_of_seven, layout, rank).total for rank in range(layout.pipeline))
        assert need <= most
    quick = fastest_layouts(request_of_seven)
    assert [one.candidate for one in quick] == [one.candidate for one in found.ranked]


def test_exact_counts_are_bounded(request_of_seven, monkeypatch):
    monkeypatch.setattr(exact_checks, "_MOST_CHECKS", 0)
    assert not search(request_of_seven).ranked
    monkeypatch.setattr(exact_checks, "_MOST_CHECKS", 2)
    counted = []
    monkeypatch.setattr(exact_checks, "ranks_of_interest", lambda request, layout: counted.append(layout) or [0])
    monkeypatch.setattr(exact_checks, "rank_memory", rank_memory)
    search(request_of_seven)
    assert len(counted) == 2


def test_a_layout_whose_mean_rank_is_over_the_limit_is_not_counted():
    """Layers that one rank gives up another one takes: the mean over ranks does not fall by moving layers."""
    request = request_for("llama-2-70b", "h100:4", global_batch=128)
    layouts = [layout for layout in candidates(request) if layout.pipeline == 4 and layout.zero == 0]
    assert layouts
    for layout in layouts[::40]:
        estimates = estimated_ranks(request, layout)
        mean = (sum(estimates) + estimates[1]) / 4  # the third rank needs no more than the second
        assert not ExactChecks(request, 0.999 * mean).may_fit(layout, estimates)
        assert ExactChecks(request, 1.001 * max(mean, max(estimates) / FURTHEST_ESTIMATE)).may_fit(layout, estimates)


def test_without_a_pipeline_nothing_is_doubtful():
    request = request_for("llama-3-8b", "h100:1", global_batch=64)
    layout = next(one for one in candidates(request) if one.pipeline == 1)
    estimates = estimated_ranks(request, layout)
    assert not ExactChecks(request, 0.999 * estimates[0]).may_fit(layout, estimates)
