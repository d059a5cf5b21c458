"""The search: tried layouts, ranking, ties, and the ranks whose memory counts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.parallel.stages.stage_layers import stage_layers
from hlat.planner.memory import ExactChecks, estimate_rank_memory, estimated_ranks, rank_memory
from hlat.planner.plan import fits, make_plan
from hlat.planner.problem.layouts import candidates, layout_text, parse_layout
from hlat.planner.report.html_report import step_timeline
from hlat.planner.search import (
    TIE_TOLERANCE,
    USABLE_MEMORY_SHARE,
    CandidateLayouts,
    break_tie,
    finalists,
    fitting_positions,
    plainest,
    predict_layout,
    search,
)
from tests.support.planner.requests import request_for

REQUESTS = [("llama-2-70b", "trn1.32xlarge:16"), ("llama-2-70b", "h100:4"), ("llama-3-8b", "p4d.24xlarge:1")]


@pytest.mark.parametrize(("model", "cluster"), REQUESTS)
def test_every_ranked_layout_fits_on_every_rank(model, cluster):
    """Inner ranks have message buffers on both sides; of them the second has the most micro-batches in flight."""
    request = request_for(model, cluster, global_batch=128)
    found = search(request)
    assert found.ranked
    for prediction in found.ranked:
        need = max(
            rank_memory(request, prediction.candidate, rank).total for rank in range(prediction.candidate.pipeline)
        )
        assert prediction.peak_memory == pytest.approx(need), prediction.candidate
        assert fits(request, prediction)


@pytest.mark.parametrize(
    "layout", ["pp=16", "pp=16,zero=0,schedule=zbv", "pp=8,schedule=interleaved-zero-bubble,vpp=2"]
)
def test_the_fullest_rank_is_reported_at_any_position(layout):
    """The tenth of 16 ranks needs most if the first have fewer layers; in a ZBV schedule the last but one."""
    request = request_for("llama-3-8b", "h100:16", global_batch=512)
    found = predict_layout(request, parse_layout(layout, request))
    needs = [rank_memory(request, found.candidate, rank).total for rank in range(found.candidate.pipeline)]
    assert found.peak_memory == pytest.approx(max(needs)), needs


@pytest.mark.parametrize(("model", "cluster"), [("llama-2-70b", "trn1.32xlarge:4"), ("llama-3-405b", "p4d.24xlarge:1")])
def test_least_memory_counts_the_fullest_rank_of_each_layout(model, cluster):
    """Nothing fits: nearly, and by far, where no estimate is counted to its last rank at first."""
    request = request_for(model, cluster)
    most = [
        max(estimate_rank_memory(request, candidate, rank).total for rank in range(candidate.pipeline))
        for candidate in candidates(request)
    ]
    assert search(request).least_memory[1] == pytest.approx(min(most))


@pytest.mark.parametrize(
    ("model", "cluster", "share"),
    [("tiny-125m", "g5.xlarge:4", 0.25), ("tiny-125m", "g5.xlarge:4", 0.5), ("llama-2-7b", "a100-40gb:2", 0.96)],
)
def test_no_layout_is_lost_since_the_one_that_recomputes_most_does_not_fit(model, cluster, share):
    """All estimates, one by one, are the witness: fitting_positions skips those of which the smallest cannot fit."""
    request = request_for(model, cluster, global_batch=64)
    listing = CandidateLayouts(request)
    tried = listing.layouts = [one for one in listing.layouts if one.context == 1 and one.tensor < 4]
    checks = ExactChecks(request, share * request.cluster.memory_bytes)
    every = [index for index, one in enumerate(tried) if checks.fits(one, estimated_ranks(request, one))]
    assert list(fitting_positions(listing, range(len(tried)), share)) == every
    assert 0 < len(every) < len(tried)


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(("tiny-125m", "llama-3.2-1b", "llama-2-7b")),
    st.sampled_from(("g5.xlarge:4", "trn1.32xlarge:1", "h100:1", "a100-40gb:2")),
    st.sampled_from((16, 64, 96)),
)
def test_layouts_judged_by_their_neighbours_are_judged_as_by_their_own_estimates(model, cluster, batch):
    """Estimates of all, and finalists of the whole list, are the witness: nothing is left out that could win."""
    request = request_for(model, cluster, global_batch=batch)
    found, limit = search(request), USABLE_MEMORY_SHARE * request.cluster.memory_bytes
    listing = CandidateLayouts(request)
    peaks = [max(estimated_ranks(request, one)) for one in listing.layouts]
    fitting = [index for index, peak in enumerate(peaks) if peak <= limit]
    own = [one for one in found.layouts if max(estimated_ranks(request, one)) <= limit]
    beyond = [one for one in found.layouts if max(estimated_ranks(request, one)) > limit]
    assert all(predict_layout(request, one).peak_memory <= limit for one in beyond), "those are counted exactly"
    assert found.tried == len(peaks) and own == [listing.layouts[index] for index in fitting]
    ranked = [one.candidate for one in found.ranked]
    for numbers in (listing.times.step, peaks) if fitting else ():
        # Of equal ones the fastest is kept.
        best = listing.layouts[min(fitting, key=lambda one: (numbers[one], listing.times.step[one]))]
        assert best in ranked or predict_layout(request, best).peak_memory > limit


def test_at_most_three_alternatives_have_the_same_degrees():
    request = request_for("llama-2-70b", "h100:4")
    same, other = (parse_layout(text, request) for text in ("tp=8,pp=2", "tp=4,pp=2"))
    layouts = [*(replace(same, micro_batch=size) for size in (1, 2, 4, 8, 16)), other]
    assert finalists(layouts, list(range(6))) == [0, 1, 2, 5]


def test_a_tie_goes_to_the_plainest_layout_that_none_of_them_beats():
    request = request_for("llama-2-70b", "h100:4")
    far, near = (predict_layout(request, parse_layout(text, request)) for text in ("tp=16", "tp=8,pp=2,recompute=full"))
    far, near = replace(far, step_seconds=1.0), replace(near, step_seconds=1.015)
    assert far.peak_memory > near.peak_memory
    assert break_tie(request, [far, near]) is near
    assert break_tie(request, [far, replace(near, step_seconds=1.025)]) is far
    less = {rank: replace(memory, parameters=0.0) for rank, memory in near.memory.items()}
    better = replace(far, memory=less, step_seconds=1.0)
    assert break_tie(request, [better, near]) is better, "the plainer one is slower and needs more"


# Near enough to each other that many are tied and some are equal.
LAYOUT = st.tuples(st.integers(1000, 1060), st.integers(1, 6), st.tuples(st.integers(0, 1), st.integers(0, 2)))


@given(st.lists(LAYOUT, min_size=1))
def test_no_choice_is_beaten_in_time_and_memory_nor_passes_a_plainer_one(layouts):
    """All layouts are compared, not only those tied: so none at the edge of memory where a faster one needs less."""
    step, peak, complexity = layouts[plainest(*zip(*layouts, strict=True))]
    assert not [one for one in layouts if one[0] < step and one[1] < peak]
    limit = (1 + TIE_TOLERANCE) * min(one[0] for one in layouts)
    assert step <= limit
    for one in layouts:
        if one[0] <= limit and one[2] < complexity:
            assert any(other[0] < one[0] and other[1] < one[1] for other in layouts), "a plainer one was passed"


@pytest.mark.parametrize(("model", "cluster"), REQUESTS)
def test_no_layout_of_a_table_beats_that_of_its_plan(model, cluster):
    plan = make_plan(request_for(model, cluster, global_batch=128))
    faster = [one for one in plan.ranked if one.step_seconds < plan.chosen.step_seconds]
    assert all(one.peak_memory >= plan.chosen.peak_memory for one in faster)


def test_all_schedules_and_zero_stages_are_tried_but_on_trainium_only_calibrated_ones():
    tried = {candidate.schedule for candidate in candidates(request_for("llama-2-70b", "h100:8"))}
    assert tried == {"1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"}
    on_trainium = list(candidates(request_for("llama-2-70b", "trn1.32xlarge:8")))
    assert {candidate.schedule for candidate in on_trainium} == {"1f1b", "interleaved-1f1b"}
    assert {candidate.zero for candidate in on_trainium} == {0, 1}
    assert {candidate.tensor for candidate in on_trainium} <= {1, 2, 8, 32}, (
        "group sizes that the NeuronLink collectives support"
    )


def test_hybrid_sharding_is_tried_in_replicas_of_whole_domains():
    request = request_for("llama-2-70b", "h100:8")
    hybrid = [candidate for candidate in candidates(request) if candidate.replicas > 1]
    assert {candidate.zero for candidate in hybrid} == {3}
    assert {candidate.tensor * candidate.shards for candidate in hybrid} == {8, 16, 32}
    fewer = [candidate for candidate in hybrid if candidate.tensor == 2][::7]
    whole = [replace(one, parallel=one.parallel.model_copy(update={"replicas": 1})) for one in fewer]
    for one, all_in_one in zip(fewer, whole, strict=True):
        assert parse_layout(layout_text(one), request) == one
        assert estimate_rank_memory(request, one, 0).total > estimate_rank_memory(request, all_in_one, 0).total
    data = [predict_layout(request, layouts[0]).components["data"] for layouts in (fewer, whole)]
    assert data[0] < data[1]


def test_backward_of_the_head_costs_two_forward_passes():
    request = request_for("llama-2-70b", "h100:16")
    prediction = predict_layout(request, parse_layout("tp=8,pp=4", request))
    layers = list(map(len, stage_layers(prediction.candidate.step_shape(request))))

    def of_the_head(seconds):
        return seconds[-1] - layers[-1] * seconds[1] / layers[1]

    assert of_the_head(prediction.stage_times.forward) > 0
    assert of_the_head(prediction.stage_times.backward) == pytest.approx(
        2 * of_the_head(prediction.stage_times.forward)
    )
    assert of_the_head(prediction.stage_times.weight) == pytest.approx(of_the_head(prediction.stage_times.forward))


def test_the_first_stage_computes_no_input_gradients():
    plan = make_plan(request_for("llama-2-70b", "h100:8", global_batch=64), "tp=8,pp=4,schedule=zbv")
    passes = [each for rank in step_timeline(plan).ranks for each in rank if each.kind == "input"]
    assert all((each.stop == pytest.approx(each.start)) == (each.stage == 0) for each in passes)
