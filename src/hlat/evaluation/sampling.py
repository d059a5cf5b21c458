"""Choice of the next token from its logits: greedy, or sampled with randomness that is addressed, not consumed.

seed, names of the text, position in it -> a number in [0, 1)        logits, number -> token

Tensor suffix: V vocabulary, K most likely tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import philox

_CANDIDATES = 512  # tokens to sort first; nearly always they have the probability that top_p asks for


@sendable
@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token.

    Raises:
        DataError: values without a meaning, all at once.
    """

    temperature: float = 0.0  # 0 is greedy: the most likely token
    top_k: int | None = None  # keep only the k most likely tokens
    top_p: float | None = None  # of these, the smallest set of most likely tokens whose total probability reaches p
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if not 0 <= self.temperature < math.inf:
            wrong.append(f"temperature {self.temperature} must be 0, which is greedy, or above.")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"top_k {self.top_k} must be 1 or above.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong.append(f"top_p {self.top_p} must be above 0 and at most 1.")
        if self.seed < 0:
            wrong.append(f"seed {self.seed} must be 0 or above.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            given = " and ".join(name for name in ("top_k", "top_p") if getattr(self, name) is not None)
            wrong.append(f"{given} has no effect at temperature 0, which is greedy. Give a temperature, such as 0.8.")
        if wrong:
            raise DataError("\n".join(wrong))


def choose_token(logits_V: torch.Tensor, sampling: Sampling, index: int, *names: str | int) -> int:
    """Choose the next token from the logits of the complete vocabulary, (V,).

    ``index`` is its position in the generated text; ``names`` tell apart texts that are sampled with the same seed.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    # On the CPU: a single token's logits are few, and CUDA has no deterministic cumulative sum of floats.
    scores_V = logits_V.cpu().double() / sampling.temperature
    scores_K, ids_K, below_all = _most_likely(scores_V, sampling)
    probabilities = (scores_K - below_all).exp()
    if sampling.top_p is not None:
        # keep a token while those before it have not reached p; always keep the most likely one
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[: max(1, int((before < sampling.top_p).sum()))]
    below = probabilities.cumsum(0) / probabilities.sum()
    draw = _uniform(sampling.seed, index, names)
    return int(ids_K[min(int((below <= draw).sum()), len(probabilities) - 1)])


def choose_on_device(logits_V: torch.Tensor, sampling: Sampling, draw_1: torch.Tensor) -> torch.Tensor:
    """Choose as ``choose_token``, without waiting for a device that has float64; returns the id (1,), int64."""
    if sampling.temperature == 0.0:
        return logits_V.argmax().view(1)
    scores_V, ids_V = (logits_V.double() / sampling.temperature).sort(descending=True, stable=True)
    scores_K = scores_V[: sampling.top_k]
    probabilities_K = (scores_K - scores_K.logsumexp(0)).exp()
    last = torch.full((1,), len(scores_K) - 1, device=ids_V.device)
    if sampling.top_p is not None:
        kept_K = running_sum(probabilities_K) - probabilities_K < sampling.top_p
        probabilities_K, last = probabilities_K * kept_K, kept_K.sum(0, keepdim=True) - 1
    below_K = running_sum(probabilities_K) / probabilities_K.sum()
    return ids_V[torch.minimum((below_K <= draw_1).sum(0, keepdim=True), last)]


def draws(seed: int, count: int) -> torch.Tensor:
    """Return the numbers in [0, 1) that choose the first tokens of a text: float64 (count,), on the CPU."""
    return philox(stream_key(seed, "sampling"), torch.arange(count))[0].double() / 2.0**32


def running_sum(values_K: torch.Tensor) -> torch.Tensor:
    """Sum each number and all before it by products of matrices: CUDA has no deterministic ``cumsum`` of floats."""
    side = math.isqrt(len(values_K)) + 1
    rows = torch.nn.functional.pad(values_K, (0, side * side - len(values_K))).view(side, side)
    ones = torch.ones_like(rows)
    within = rows @ ones.triu()
    return (within + ones.tril(-1) @ within[:, -1:]).flatten()[: len(values_K)]


def choose_tokens(
    logits_BV: torch.Tensor, sampling: Sampling, index: int, names: Sequence[tuple[str | int, ...]]
) -> list[int]:
    """Choose a token for each of several texts at the same position; see ``choose_token``."""
    if sampling.temperature == 0.0:
        return [int(token) for token in logits_BV.argmax(1).tolist()]
    logits = logits_BV.cpu()  # once: each copy from a device waits for it
    return [choose_token(logits_V, sampling, index, *each) for logits_V, each in zip(logits, names, strict=True)]


def _most_likely(scores_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the tokens that may be chosen: their scores and ids, and the logarithm of their total."""
    count = len(scores_V)
    if sampling.top_k is not None or sampling.top_p is not None:
        count = min(count, sampling.top_k or _CANDIDATES)
        # All tokens at least as likely as the last candidate, so that ties have the order of the vocabulary.
        candidates = (scores_V >= scores_V.topk(count).values[-1]).nonzero()[:, 0]
        scores_K, order = scores_V[candidates].sort(descending=True, stable=True)
        total = scores_V.logsumexp(0) if sampling.top_k is None else scores_K[:count].logsumexp(0)
        if sampling.top_k is not None or float((scores_K - total).exp().sum()) >= (sampling.top_p or 0.0):
            most = len(candidates) if sampling.top_k is None else count
            return scores_K[:most], candidates[order][:most], total
    scores_K, ids_K = scores_V.sort(descending=True, stable=True)
    return scores_K, ids_K, scores_V.logsumexp(0)


def _uniform(seed: int, index: int, names: tuple[str | int, ...]) -> float:
    """Return a number in [0, 1) that depends only on seed, names and position."""
    word = philox(stream_key(seed, "sampling", *names), torch.tensor(index))[0]
    return int(word) / 2.0**32
