"""Generation without the host: the work of one token is recorded once, and the device repeats it.

    prompt --> KV cache, first token --> [ token -> hidden states -> logits -> next token ] repeated on the device
                                              some tokens at a time --> host: has the text ended?

The host starts 30 operations for each block and token, which takes longer than the device needs for them. Captured CUDA
graphs have not been run on a GPU yet; tests repeat the same step on a CPU.

Tensor suffixes: N new tokens, V vocabulary.
"""

from collections.abc import Callable, Collection

import torch

from hlat.evaluation.sampling import Sampling, choose_on_device, draws
from hlat.model import Decoder, DeviceKVCache, KVCache
from hlat.runtime.backend.table import backend_of

_TOKENS_PER_READ = 16
"""Tokens after which the host looks for the end of the text; those after it were computed in vain."""


def decode_on_device(
    model: Decoder, prompt: list[int], count: int, sampling: Sampling, end_ids: Collection[int]
) -> list[int]:
    """Continue a prompt by ``count`` tokens at most, or to the first of ``end_ids``; returns the new tokens.

    Args:
        model: a complete model, on a device with ``has_graphs``.
        prompt: at least one token id.
        count: largest number of new tokens.
        sampling: how to choose tokens.
        end_ids: tokens that end the text.
    """
    step = _TokenStep(model, prompt, count, sampling)
    repeat: Callable[[], object] = step
    done, tokens = 1, list[int]()
    while done < count and not _ended(tokens, end_ids):
        stop = min(count, done + _TOKENS_PER_READ)
        if done > _TOKENS_PER_READ:  # the tokens so far have compiled and loaded all kernels
            repeat = repeat if repeat is not step else backend_of(step.device).record(step)
        for _ in range(done, stop):
            repeat()
        done, tokens = stop, step.tokens(stop)
    tokens = tokens or step.tokens(done)
    ends = [place for place, token in enumerate(tokens) if token in end_ids]
    return tokens[: ends[0]] if ends else tokens


def _ended(tokens: list[int], end_ids: Collection[int]) -> bool:
    return any(token in end_ids for token in tokens)


class _TokenStep:
    """The work of one token, on the same memory in each call.

    Args:
        model: the model.
        prompt: token ids; they are computed, and the first new token is chosen.
        count: largest number of new tokens.
        sampling: how to choose tokens.
    """

    def __init__(self, model: Decoder, prompt: list[int], count: int, sampling: Sampling) -> None:
        weight = next(model.parameters())
        self.device = weight.device
        self._model, self._sampling = model, sampling
        self._draws_N = draws(sampling.seed, count).to(self.device)
        self._tokens_N = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._newest_11 = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self._index_1 = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the next token
        cache = KVCache(model.config, 1, len(prompt) + count, self.device, model.compute or weight.dtype)
        self._choose(model.hidden(torch.tensor([prompt], device=self.device), cache=cache))
        self._cache = DeviceKVCache(cache, model.window)

    def __call__(self) -> None:
        """Compute the newest token, and choose the next one."""
        self._choose(self._model.hidden(self._newest_11, positions=self._cache.positions_B1, cache=self._cache))

    def tokens(self, count: int) -> list[int]:
        """Return the first new tokens; waits for the device."""
        chosen: list[int] = self._tokens_N[:count].tolist()
        return chosen

    def _choose(self, hidden_1SD: torch.Tensor) -> None:
        assert self._model.head is not None, "the model is complete"
        token_1 = choose_on_device(self._model.head(hidden_1SD[0, -1]), self._sampling, self._draws_N[self._index_1])
        self._newest_11.copy_(token_1)
        self._tokens_N.index_copy_(0, self._index_1, token_1)
        self._index_1 += 1
