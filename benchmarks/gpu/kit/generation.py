"""Generation and scoring: tokens per second of a 1B model in bf16, and greedy texts of a small one against a CPU.

random weights, prompts --BatchGenerator, score_all, as ``hlat evaluate`` uses them--> tokens per second
"""

import time
from typing import Any

import torch

from hlat.evaluation.generation import BatchGenerator, GenerationRequest, plan_generation
from hlat.evaluation.generation import generate as generate_one
from hlat.evaluation.next_token import Sampling, prepare_to_generate
from hlat.evaluation.scoring import ScoreRequest, score_all
from hlat.model import build
from hlat.parallel import ForwardModel
from hlat.runtime.backend.device import configure_numerics, synchronize
from kit.child import Context
from kit.shapes import recipe
from kit.training import device_of, memory

_PROMPT, _NEW, _SCORED = 128, 64, 512


def run(context: Context) -> None:
    """Compare texts, then measure."""
    device = device_of(context.device)
    configure_numerics(device, deterministic=True)
    with context.part("greedy texts"):
        same_texts(context, device)
    with context.part("model"):
        config = recipe("1b", context.tiny, context.device, context.work).model
        model = forward_model(config, device, torch.bfloat16)
    if context.errors:
        return
    new = 4 if context.tiny else _NEW
    for rows in (1, 8, 32):
        with context.part(f"{rows} rows"):
            requests = prompts(config.vocab_size, rows, 8 if context.tiny else _PROMPT, new)
            generate(model, requests[:1])  # loads kernels
            synchronize(device)
            began = time.perf_counter()
            generate(model, requests)
            synchronize(device)
            context.found({f"tokens_per_second_{rows}_rows": rows * new / (time.perf_counter() - began)})
    with context.part("scoring"):
        score(context, model, config.vocab_size)
    context.found(memory(device))


def forward_model(config: Any, device: torch.device, dtype: torch.dtype) -> ForwardModel:
    """Build a model with random weights that only generates and scores."""
    decoder = build(config, device=device, seed=1, dtype=dtype).eval()
    prepare_to_generate(decoder)
    return ForwardModel(decoder, device)


def prompts(words: int, rows: int, length: int, new: int) -> list[GenerationRequest]:
    """Return requests with random prompts."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (rows, length), generator=generator).tolist()
    return [GenerationRequest(tuple(row), new) for row in tokens]


def generate(model: ForwardModel, requests: list[GenerationRequest]) -> list[list[int]]:
    """Generate greedily; return the new tokens of each request."""
    generator = BatchGenerator(model, frozenset(), lambda tokens: "")
    texts: list[list[int]] = [[] for _ in requests]
    for batch in plan_generation(requests):
        for index, text in zip(batch.order, generator.generate(batch), strict=True):
            texts[index] = text
    return texts


def same_texts(context: Context, device: torch.device) -> None:
    """Compare greedy texts in fp32 with those of a CPU, and the log-probabilities of the CPU's texts.

    Weights are large, so that the likeliest token is likelier than the next one by more than rounding.
    """
    config = recipe("parity", context.tiny, context.device, context.work).model.model_copy(update={"init_std": 0.2})
    requests = prompts(config.vocab_size, 4, 8, 12)
    models = [forward_model(config, each, torch.float32) for each in (torch.device("cpu"), device)]
    expected, found = (generate(model, requests) for model in models)
    context.check("greedy texts are those of a CPU", found == expected, [found, expected])
    for sampling in (Sampling(), Sampling(1.0, top_p=0.8)):  # one text: its work is recorded after 17 tokens
        texts = [generate_one(each.decoder, list(requests[0].context), 23, sampling) for each in models]
        context.check(f"one text is that of a CPU: {sampling}", texts[0] == texts[1], texts)
    asked = [ScoreRequest(each.context, tuple(text)) for each, text in zip(requests, expected, strict=True)]
    theirs, ours = ([score.log_probability for score in score_all(model, asked)] for model in models)
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    # A sum of twelve log-probabilities; each has the error of sums of some hundred products in fp32 (6e-8 each).
    bound = 12 * 1000 * 2.0**-24 * max(map(abs, theirs))
    context.found({"scores minus those of a CPU": difference, "bound of scores": bound})
    context.check("scores are those of a CPU", difference <= bound, difference)


def score(context: Context, model: ForwardModel, words: int) -> None:
    """Measure scoring of long continuations."""
    rows, length = (2, 32) if context.tiny else (32, _SCORED)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, words, (rows, length + 1), generator=generator).tolist()
    requests = [ScoreRequest((row[0],), tuple(row[1:])) for row in tokens]
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        score_all(model, requests)
        seconds.append(time.perf_counter() - began)
    context.found({"scored_tokens_per_second": rows * length / min(seconds)})
