"""The plain way to score: one forward pass over one sequence at a time, nothing shared, no cache, no batch."""

from collections.abc import Sequence
from typing import Any

import torch

from hlat.evaluation.scoring import ScoreRequest
from hlat.model import Decoder


@torch.no_grad()
def plain_score(model: Decoder, request: ScoreRequest) -> tuple[float, bool]:
    """Log-probability of the continuation, and True if it is the greedy one."""
    tokens = torch.tensor([request.context + request.continuation])
    logits_SV = model(tokens[:, :-1])[0, len(request.context) - 1 :].double()
    targets_S = tokens[0, len(request.context) :]
    log_S = logits_SV.log_softmax(-1).gather(1, targets_S[:, None])
    return float(log_S.sum()), bool((logits_SV.argmax(-1) == targets_S).all())


def few_shot_requests(generator: torch.Generator, vocabulary: int = 211) -> list[ScoreRequest]:
    """Requests as evaluations have them: prefixes of many documents, choices of one context, single sequences."""

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())

    requests = []
    for shots in (draw(40), draw(57)):  # two subjects with few-shot prefixes
        for length in (5, 9, 9):
            context = shots + draw(length)
            requests += [ScoreRequest(context, draw(1)) for _ in range(4)]
    context, start = draw(12), draw(3)
    requests += [ScoreRequest(context, start + draw(more)) for more in (1, 2, 7)]  # choices that begin alike
    requests.append(ScoreRequest(context, start))  # the beginning of the others
    requests += [ScoreRequest(draw(1), draw(length)) for length in (1, 30)]
    requests.append(requests[0])  # a request that occurs twice
    return requests


def mixed(requests: Sequence[ScoreRequest], generator: torch.Generator) -> list[ScoreRequest]:
    """The same requests in another order."""
    return [requests[index] for index in torch.randperm(len(requests), generator=generator).tolist()]


def count_computed_tokens(model: Decoder) -> list[int]:
    """Return a list that gets the number of tokens of each forward pass from now on."""
    counts: list[int] = []
    hidden = model.hidden

    def counted(tokens: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        counts.append(tokens.numel())
        return hidden(tokens, *rest, **named)

    model.hidden = counted  # type: ignore[method-assign]
    return counts
