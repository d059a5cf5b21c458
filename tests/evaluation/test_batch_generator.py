"""Texts generated together equal those generated one by one, whatever their prefixes, lengths and ends."""

from typing import Any

import pytest
import torch

from hlat.evaluation import Sampling, generate
from hlat.evaluation.generation import BatchGenerator, GenerationLimits, GenerationRequest, plan_generation
from hlat.model import Decoder
from hlat.parallel import ForwardModel
from tests.support.model.families import FAMILIES, config_of, our_model


def spell(tokens: list[int]) -> str:
    """Text of tokens: a character each."""
    return "".join(chr(0x100 + token) for token in tokens)


def run(
    model: Decoder,
    requests: list[GenerationRequest],
    limits: GenerationLimits | None = None,
    end_ids: frozenset[int] = frozenset(),
) -> list[list[int]]:
    generator = BatchGenerator(ForwardModel(model, torch.device("cpu")), end_ids, spell)
    texts: list[list[int]] = [[] for _ in requests]
    for batch in plan_generation(requests, limits):
        for index, text in zip(batch.order, generator.generate(batch), strict=True):
            texts[index] = text
    return texts


def contexts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 211, (count,), generator=generator).tolist())

    prefix = draw(33)
    return [prefix + draw(count) for count in (2, 5, 1)] + [draw(count) for count in (1, 11, 30)]


def _cases() -> list[Any]:
    """Every family in batches of two rows, and in the default suite a few whose texts are all in one batch."""
    together = ("llama31-gqa", "mistral-window", "olmo2-mha")
    return [pytest.param(family, GenerationLimits(rows=2), id=f"{family}, two rows") for family in FAMILIES] + [
        pytest.param(family, GenerationLimits(), marks=[] if family in together else [pytest.mark.slow], id=family)
        for family in FAMILIES
    ]


@pytest.mark.parametrize(("family", "limits"), _cases())
def test_texts_generated_together_equal_those_generated_alone(family: str, limits: GenerationLimits) -> None:
    model = our_model(config_of(family), torch.float64)
    texts = run(model, [GenerationRequest(context, 20) for context in contexts()], limits)
    assert texts == [generate(model, list(context), 20) for context in contexts()]
    assert len({token for text in texts for token in text}) > 10  # constant texts would prove little


def test_rows_that_have_ended_leave_the_others_as_they_were() -> None:
    model = our_model(config_of("llama31-gqa"), torch.float64)
    alone = [generate(model, list(context), 30) for context in contexts()]
    ends = frozenset(text[place] for text, place in zip(alone, (3, 9, 4, 15, 6, 2), strict=True))
    expected = [generate(model, list(context), 30, end_ids=ends) for context in contexts()]
    assert len({len(text) for text in expected}) > 2
    assert run(model, [GenerationRequest(context, 30) for context in contexts()], end_ids=ends) == expected


def test_a_text_ends_where_a_stop_text_is_complete() -> None:
    model = our_model(config_of("llama2-mha"), torch.float64)
    alone = [generate(model, list(context), 30) for context in contexts()]
    stop = (spell(alone[0][4:6]), spell(alone[4][7:8]))
    texts = run(model, [GenerationRequest(context, 30, stop) for context in contexts()])
    for text, complete in zip(texts, alone, strict=True):
        ends = [i for i in range(1, 31) if any(spell(complete[:i]).endswith(each) for each in stop)]
        assert text == complete[: min([*ends, 30])]
    assert len(texts[0]) <= 6 and len(texts[4]) <= 8


def test_samples_depend_on_seed_context_and_repeat_only() -> None:
    model = our_model(config_of("llama2-mha"), torch.float64)
    sampling = Sampling(1.0, top_p=0.9, seed=3)
    requests = [GenerationRequest(context, 12, (), sampling, n) for context in contexts()[:3] for n in range(3)]
    texts = run(model, requests)
    assert texts == run(model, requests, GenerationLimits(rows=1)) == list(reversed(run(model, requests[::-1])))
    assert len({tuple(text) for text in texts}) == len(texts)
    other = [
        GenerationRequest(each.context, 12, (), Sampling(1.0, top_p=0.9, seed=4), each.repeat) for each in requests
    ]
    assert run(model, other) != texts


def test_repeats_compute_their_context_once() -> None:
    model = our_model(config_of("llama2-mha"))
    generator = BatchGenerator(ForwardModel(model, torch.device("cpu")), frozenset(), spell)
    requests = [GenerationRequest(tuple(range(50)), 1, (), Sampling(1.0), repeat) for repeat in range(8)]
    for batch in plan_generation(requests):
        generator.generate(batch)
    assert generator.computed_tokens == 49 + 8, "all but the last token once, and the last token of each"
