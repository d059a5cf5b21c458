"""Scores equal those of one sequence at a time, for every family, however requests share prefixes and batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from hlat.evaluation.scoring import BatchLimits, Score, Scorer, ScoreRequest, plan_batches, score_all
from hlat.model import Decoder
from hlat.parallel import ForwardModel
from tests.support.evaluation.plain_scores import few_shot_requests, mixed, plain_score
from tests.support.model.families import FAMILIES, config_of, our_model


def forward(model: Decoder) -> ForwardModel:
    return ForwardModel(model, torch.device("cpu"))


def _cases() -> list[Any]:
    """Every family in small batches, and in the default suite a few whose requests are all in one batch."""
    small, together = BatchLimits(tokens=40, cached=150, row=20), ("llama31-gqa", "mistral-window", "olmo2-mha")
    return [pytest.param(family, small, id=f"{family}, small batches") for family in FAMILIES] + [
        pytest.param(family, BatchLimits(), marks=[] if family in together else [pytest.mark.slow], id=family)
        for family in FAMILIES
    ]


@pytest.mark.parametrize(("family", "limits"), _cases())
def test_scores_equal_those_of_one_sequence_at_a_time(family: str, limits: BatchLimits) -> None:
    model = our_model(config_of(family), torch.float64)
    generator = torch.Generator().manual_seed(3)
    requests = mixed(few_shot_requests(generator), generator)
    scores = score_all(forward(model), requests, limits)
    # float64: sums of a few hundred terms in another order
    for request, score in zip(requests, scores, strict=True):
        expected, greedy = plain_score(model, request)
        assert score.log_probability == pytest.approx(expected, abs=1e-9)
        assert score.is_greedy == greedy
        assert score.tokens == len(request.continuation)


def test_greedy_continuations_are_recognised() -> None:
    model = our_model(config_of("llama2-mha"), torch.float64)
    context = (5, 17, 3)
    tokens = list(context)
    for _ in range(4):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    best = tuple(tokens[3:])
    other = (*best[:3], (best[3] + 1) % 211)
    scores = score_all(forward(model), [ScoreRequest(context, best), ScoreRequest(context, other)])
    assert [score.is_greedy for score in scores] == [True, False]


def test_the_first_of_equally_likely_tokens_is_the_greedy_one() -> None:
    """As argmax of numpy and torch; a model whose head is zero finds all tokens equally likely."""
    model = our_model(config_of("llama2-mha"))
    assert model.head is not None
    model.head.matrix.data.zero_()
    first, second = score_all(forward(model), [ScoreRequest((1,), (0,)), ScoreRequest((1,), (1,))])
    assert first == Score(pytest.approx(-torch.tensor(211.0).log().item(), abs=1e-5), True, 1)
    assert second.is_greedy is False


def test_shared_prefixes_are_computed_once() -> None:
    model = our_model(config_of("llama2-mha"))
    scorer, prefix = Scorer(forward(model)), tuple(range(60))
    requests = [ScoreRequest((*prefix, 100 + doc, 7), (choice,)) for doc in range(6) for choice in range(4)]
    for batch in plan_batches(requests):
        scorer.score(batch)
    assert scorer.computed_tokens == 60 + 6 * 2, "the prefix, and two tokens of each document; choices cost nothing"


@pytest.mark.parametrize("context", [1, 24, 25, 40])
def test_a_stem_leaves_the_last_token_of_every_context(context: int) -> None:
    """The first scored token is predicted from it. Choices that begin alike share more than their context."""
    model = our_model(config_of("llama2-mha"), torch.float64)
    begin, alike = tuple(range(context)), tuple(range(100, 130))
    requests = [ScoreRequest(begin, (*alike, *range(first, first + 80))) for first in range(120, 124)]
    requests += [ScoreRequest(begin, tuple(range(first, first + 50))) for first in range(130, 134)]
    plan = plan_batches(requests, BatchLimits(row=1))
    assert all(batch.stem < len(request.context) for batch in plan for request in batch.requests)
    assert any(batch.stem for batch in plan) == (context > 24), "24 tokens are the shortest stem"
    for request, score in zip(requests, score_all(forward(model), requests, BatchLimits(row=1)), strict=True):
        assert score.log_probability == pytest.approx(plain_score(model, request)[0], abs=1e-9)


def test_all_requests_of_a_batch_begin_with_its_stem() -> None:
    """A row takes requests that share half of their tokens: less than its first request shares with other rows."""
    alike, other = tuple(range(60)), tuple(range(100, 130))
    requests = [
        ScoreRequest((*alike, 200, 201), (1,)),
        ScoreRequest((*alike[:34], *other), (1,)),  # in the row of the first; only 34 tokens are common
        ScoreRequest((*alike, *range(300, 400)), (1,)),
        ScoreRequest((*alike, *range(400, 500)), (1,)),
    ]
    plan = plan_batches(requests)
    assert all(len({request.inputs[: batch.stem] for request in batch.requests}) == 1 for batch in plan)
    assert any(batch.stem for batch in plan), "no stem: nothing was tried"


def test_choices_of_one_context_are_computed_with_it() -> None:
    model = our_model(config_of("llama2-mha"))
    scorer, context = Scorer(forward(model)), tuple(range(20))
    requests = [ScoreRequest(context, (choice, 5, 6)) for choice in range(4)]
    (batch,) = plan_batches(requests)
    scorer.score(batch)
    assert scorer.computed_tokens == 20 + 4 * 2


def test_a_plan_has_every_request_once_and_does_not_depend_on_their_order() -> None:
    generator = torch.Generator().manual_seed(4)
    requests = few_shot_requests(generator)
    plan = plan_batches(requests, BatchLimits(tokens=64, row=20))
    assert sorted(index for batch in plan for index in batch.order) == list(range(len(requests)))
    other = plan_batches(mixed(requests, generator), BatchLimits(tokens=64, row=20))
    assert [(batch.stem, batch.rows) for batch in plan] == [(batch.stem, batch.rows) for batch in other]
    assert sum(batch.stem > 0 for batch in plan) >= 2


@pytest.mark.parametrize("limits", [BatchLimits(100, 10_000, 1), BatchLimits(10_000, 700, 1)], ids=["tokens", "cache"])
def test_batches_are_as_large_as_their_limits_allow(limits: BatchLimits) -> None:
    """A forward pass computes rows without their stem; the cache has the stem in every row."""
    stem = tuple(range(40))
    requests = [ScoreRequest((*stem, *range(200 * doc, 200 * doc + 50 + doc % 7), 7), (1,)) for doc in range(1, 21)] + [
        ScoreRequest((*stem, *range(9000 + 20 * doc, 9010 + 20 * doc + doc % 5)), (1,)) for doc in range(20)
    ]
    plan = plan_batches(requests, limits)
    families: dict[int, list[list[int]]] = {}
    for batch in plan:
        assert all(len(row) == 1 for row in batch.rows)
        families.setdefault(batch.stem, []).append([len(row[0].inputs) for row in batch.rows])
    assert max(families) >= 36

    def fits(stem: int, rows: list[int]) -> bool:
        return len(rows) * (max(rows) - stem) <= limits.tokens and len(rows) * max(rows) <= limits.cached

    for stem_tokens, batches in families.items():
        assert all(fits(stem_tokens, rows) or len(rows) == 1 for rows in batches)
        for rows, after in pairwise(batches):
            assert rows == sorted(rows, reverse=True) and not fits(stem_tokens, [*rows, after[0]])


@pytest.mark.parametrize(("context", "continuation"), [(5, 3), (8, 1), (1, 8), (9, 3), (20, 2), (2, 12)])
def test_truncation_keeps_the_end_as_lm_eval_does(context: int, continuation: int) -> None:
    """Its rule: of context and continuation the last ``longest + 1`` tokens, of which the last is not read."""
    longest = 8
    tokens = tuple(range(context + continuation))
    cut = ScoreRequest(tokens[:context], tokens[context:]).truncated(longest)
    assert cut.inputs == tokens[-(longest + 1) :][:-1]
    assert cut.continuation == tokens[-min(continuation, longest) :]
