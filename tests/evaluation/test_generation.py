"""Generation: the KV cache does not change the text; sampling depends on seed and position, and follows the softmax."""

import math
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.config.sections.model import ModelConfig
from hlat.evaluation import Sampling, generate
from hlat.evaluation.fast_decoding import _TokenStep
from hlat.evaluation.sampling import choose_on_device, choose_token, running_sum
from hlat.model import build
from hlat.runtime.backend.cpu import CpuBackend
from hlat.runtime.errors import DataError
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import philox

CONFIG = ModelConfig(vocab_size=50, layers=2, hidden_size=32, intermediate_size=96, heads=4, kv_heads=2, init_std=0.4)


@pytest.fixture(scope="module")
def model():
    # init_std 0.4 instead of 0.02: far-apart logits, so that a wrong mask or position changes the text
    return build(CONFIG, device=torch.device("cpu"), seed=2, dtype=torch.float64)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_k=5)])
def test_the_text_is_the_same_with_and_without_the_kv_cache(model, sampling):
    prompt = [1, 7, 3, 3, 20]
    cached = generate(model, prompt, 40, sampling)
    assert cached == generate(model, prompt, 40, sampling, use_cache=False)
    assert len(cached) == 40 and len(set(cached)) > 3


class _Operators(TorchDispatchMode):
    """Operators that run, with the shapes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((str(func), [each.shape for each in args if isinstance(each, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


SAMPLINGS = [
    None,
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8, seed=1),
    Sampling(temperature=1.3, top_k=20, top_p=0.8, seed=2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("window", [None, 7])
def test_recorded_steps_give_the_same_text(window, sampling):
    """The texts end where the host would end them, though it looks at some tokens only."""
    config = CONFIG if window is None else CONFIG.model_copy(update={"sliding_window": window})
    model = build(config, device=torch.device("cpu"), seed=2, dtype=torch.float64)
    prompt = [1, 7, 3, 3, 20]
    expected = {count: generate(model, prompt, count, sampling) for count in (1, 2, 17, 45)}
    with patch.object(CpuBackend, "has_graphs", True), patch.object(CpuBackend, "record", autospec=True) as record:
        record.side_effect = lambda backend, work: work
        assert {count: generate(model, prompt, count, sampling) for count in expected} == expected
        assert record.called, "the third part of a text is repeated work"
        text = expected[45]
        for end in {text[0], text[20], text[-1]}:
            assert generate(model, prompt, 45, sampling, end_ids={end}) == text[: text.index(end)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_recorded_step_has_the_same_operations_each_time_and_reads_nothing_back(model, sampling):
    """As a device needs them to repeat it: the same shapes, and no value for the host in between."""
    with torch.no_grad():
        step = _TokenStep(model, [1, 7, 3], 6, sampling or Sampling())
        step()
        runs = []
        for _ in range(2):
            with _Operators() as operators:
                step()
            runs.append(operators.seen)
    assert runs[0] == runs[1]
    names = {name for name, _ in runs[0]}
    assert not names & {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}


def test_the_largest_draw_chooses_the_last_token_that_is_kept():
    """Rounding may leave the sum of all probabilities below it."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for sampling, last in ((Sampling(1.0, top_p=0.6), 1), (Sampling(1.0, top_k=3), 2), (Sampling(1.0), 3)):
        assert choose_on_device(logits, sampling, torch.ones(1, dtype=torch.float64)).tolist() == [last]


def test_sums_by_products_are_those_of_cumsum():
    """Additions in another order: relative to the sum at most as many roundings of float64 as there are terms."""
    for length in (1, 2, 50, 1037):
        values = torch.rand(length, dtype=torch.float64)
        assert bool(((running_sum(values) - values.cumsum(0)).abs() <= length * 2.0**-53 * values.sum()).all())


def test_the_same_seed_repeats_the_text_and_another_seed_does_not(model):
    texts = [generate(model, [1], 30, Sampling(temperature=1.0, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_a_top_k_of_one_and_a_tiny_top_p_are_greedy(model):
    greedy = generate(model, [4, 2], 30)
    assert generate(model, [4, 2], 30, Sampling(temperature=1.0, top_k=1)) == greedy
    assert generate(model, [4, 2], 30, Sampling(temperature=1.0, top_p=1e-9)) == greedy


def test_numbers_without_a_meaning_are_refused_all_at_once(model):
    with pytest.raises(DataError) as caught:
        Sampling(-1.0, top_k=0, top_p=5.0, seed=-1)
    for word in ("temperature -1.0", "top_k 0", "top_p 5.0", "seed -1"):
        assert word in str(caught.value)
    for wrong in (math.nan, math.inf):
        with pytest.raises(DataError, match="temperature"):
            Sampling(wrong)
    with pytest.raises(DataError, match="top_p has no effect at temperature 0"):
        Sampling(top_p=0.9)
    with pytest.raises(DataError, match="max_tokens -3 must be 1"):
        generate(model, [1], -3)


def test_the_end_of_text_token_ends_the_text_and_is_not_returned(model):
    greedy = generate(model, [4, 2], 30)
    end = greedy[10]
    assert generate(model, [4, 2], 30, end_ids={end}) == greedy[: greedy.index(end)]


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_ends_at_the_maximum_sequence_length(model, use_cache):
    """Positions beyond it were never trained. A model without a maximum has no such limit."""
    prompt = [1, 7, 3, 3, 20]
    free = generate(model, prompt, 40)
    declared = build(CONFIG.model_copy(update={"max_sequence_length": 16}), device="cpu", seed=2, dtype=torch.float64)
    assert generate(declared, prompt, 40, use_cache=use_cache) == free[: 16 - len(prompt)]
    assert generate(declared, prompt, 3, use_cache=use_cache) == free[:3]
    assert len(generate(declared, [1] * 15, 3)) == 1
    with pytest.raises(DataError, match=r"16 tokens.*limit is 16 .*Shorten the prompt to 15"):
        generate(declared, [1] * 16, 3)


def test_sampled_tokens_follow_the_softmax():
    shares = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    draws = 1000
    counts = Counter(choose_token(shares.log(), Sampling(temperature=1.0, seed=1), index) for index in range(draws))
    for token, share in enumerate(shares.tolist()):
        sigma = (draws * share * (1 - share)) ** 0.5
        assert abs(counts[token] - draws * share) < 5 * sigma
    top_p = Counter(choose_token(shares.log(), Sampling(1.0, top_p=0.6, seed=1), index) for index in range(draws))
    assert set(top_p) == {0, 1}, "0.5 has not reached 0.6, 0.5 + 0.2 has"
    sigma = (draws * (5 / 7) * (2 / 7)) ** 0.5
    assert abs(top_p[0] - draws * 5 / 7) < 5 * sigma, "what is left is renormalised"


@pytest.mark.parametrize("temperature", [0.3, 3.0])  # the second needs more than the tokens that are sorted first
def test_sampling_from_a_part_of_a_large_vocabulary_equals_sorting_all_of_it(temperature):
    """Top-p by its definition: sort, accumulate, cut, choose by the inverse of the distribution function."""
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[1000:1010] = logits.max()  # ties
    sampling = Sampling(temperature, top_p=0.9, seed=2)
    order = sorted(range(4000), key=lambda token: (-float(logits[token]), token))
    shares = (logits[order] / temperature).softmax(0)
    kept = int((shares.cumsum(0) < 0.9).sum()) + 1
    below = shares[:kept].cumsum(0) / shares[:kept].sum()
    for index in range(40):
        draw = int(philox(stream_key(2, "sampling", "text"), torch.tensor(index))[0]) / 2.0**32
        assert choose_token(logits, sampling, index, "text") == order[int((below <= draw).sum())]


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(DataError, match="prompt"):
        generate(model, [], 5)


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    """Two of four equally likely tokens have a probability of exactly one half."""
    drawn = {choose_token(torch.zeros(4), Sampling(1.0, top_p=0.5), index) for index in range(100)}
    assert drawn == {0, 1}
