"""What a search tries, keeps and chooses, and of which ranks it takes the memory."""

from dataclasses import replace

import pytest

from hlat.parallel.stages import stage_layers
from hlat.planner.memory import estimate_rank_memory, rank_memory
from hlat.planner.problem import candidates, parse_layout
from hlat.planner.report.trace import step_timeline
from hlat.planner.search import fits
from hlat.planner.search.plan import make_plan
from hlat.planner.search.search import _finalists, predict_layout, search
from hlat.planner.search.tie_break import break_tie
from tests.support.planner.questions import question

QUESTIONS = [("llama-2-70b", "trn1.32xlarge:16"), ("llama-2-70b", "h100:4"), ("llama-3-8b", "p4d.24xlarge:1")]


@pytest.mark.parametrize(("model", "cluster"), QUESTIONS)
def test_whatever_is_found_fits_on_every_rank(model, cluster):
    """Ranks between the ends have buffers for messages from both sides: of them the first has most passes in flight."""
    asked = question(model, cluster, global_batch=128)
    found = search(asked)
    assert found.ranked
    for one in found.ranked:
        need = max(rank_memory(asked, one.candidate, rank).total for rank in range(one.candidate.pipeline))
        assert one.peak_memory == pytest.approx(need), one.candidate
        assert fits(asked, one)


@pytest.mark.parametrize(
    "layout", ["pp=16", "pp=16,zero=0,schedule=zbv", "pp=8,schedule=interleaved-zero-bubble,vpp=2"]
)
def test_the_fullest_rank_is_told_wherever_it_stands(layout):
    """Of 16 ranks the tenth has most where the first have fewer layers; in a V the last but one waits longest."""
    asked = question("llama-3-8b", "h100:16", global_batch=512)
    found = predict_layout(asked, parse_layout(layout, asked))
    needs = [rank_memory(asked, found.candidate, rank).total for rank in range(found.candidate.pipeline)]
    assert found.peak_memory == pytest.approx(max(needs)), needs


def test_the_least_memory_is_that_of_the_rank_with_most():
    asked = question("llama-2-70b", "trn1.32xlarge:4")
    most = [
        max(estimate_rank_memory(asked, one, rank).total for rank in range(one.pipeline)) for one in candidates(asked)
    ]
    assert search(asked).least_memory[1] == pytest.approx(min(most))


def test_at_most_three_alternatives_have_the_same_degrees():
    asked = question("llama-2-70b", "h100:4")
    same, other = (parse_layout(text, asked) for text in ("tp=8,pp=2", "tp=4,pp=2"))
    layouts = [*(replace(same, micro_batch=size) for size in (1, 2, 4, 8, 16)), other]
    assert _finalists(layouts, list(range(6))) == [0, 1, 2, 5]


def test_of_what_cannot_be_told_apart_the_one_on_fast_links_is_taken():
    asked = question("llama-2-70b", "h100:4")
    far, near = (predict_layout(asked, parse_layout(text, asked)) for text in ("tp=16", "tp=8,pp=2,recompute=full"))
    far, near = replace(far, step_seconds=1.0), replace(near, step_seconds=1.03)
    assert break_tie([far, near], domain=8) is near
    assert break_tie([far, replace(near, step_seconds=1.05)], domain=8) is far


def test_every_schedule_and_stage_of_zero_is_tried_but_those_that_nobody_has_run_on_trainium():
    tried = {one.schedule for one in candidates(question("llama-2-70b", "h100:8"))}
    assert tried == {"1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"}
    there = list(candidates(question("llama-2-70b", "trn1.32xlarge:8")))
    assert {one.schedule for one in there} == {"1f1b", "interleaved-1f1b"}
    assert {one.zero for one in there} == {0, 1}
    assert {one.tensor for one in there} <= {1, 2, 8, 32}, "groups that NeuronLink has collectives for"


def test_the_head_costs_backward_what_two_of_its_forward_products_do():
    asked = question("llama-2-70b", "h100:16")
    one = predict_layout(asked, parse_layout("tp=8,pp=4", asked))
    layers = list(map(len, stage_layers(one.candidate.step_shape(asked))))

    def of_the_head(seconds):
        return seconds[-1] - layers[-1] * seconds[1] / layers[1]

    assert of_the_head(one.stage_times.forward) > 0
    assert of_the_head(one.stage_times.backward) == pytest.approx(2 * of_the_head(one.stage_times.forward))
    assert of_the_head(one.stage_times.weight) == pytest.approx(of_the_head(one.stage_times.forward))


def test_the_first_stage_sends_gradients_to_nobody():
    given = make_plan(question("llama-2-70b", "h100:8", global_batch=64), "tp=8,pp=4,schedule=zbv")
    passes = [one for rank in step_timeline(given).ranks for one in rank if one.kind == "input"]
    assert all((one.stop == pytest.approx(one.start)) == (one.stage == 0) for one in passes)
