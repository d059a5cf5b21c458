"""Keys and values of a stem: tokens at the beginning of all sequences of a batch, which are computed once."""

import torch

from hlat.evaluation.scoring.requests import Tokens
from hlat.model import KVCache
from hlat.parallel import ForwardModel


class StemCache:
    """KV cache of the last stem, because batches with the same stem follow each other.

    Args:
        model: computes the stems.

    Attributes:
        computed_tokens: tokens of all stems that were computed.
    """

    def __init__(self, model: ForwardModel) -> None:
        self._model = model
        self._last: tuple[Tokens, KVCache] | None = None
        self.computed_tokens = 0

    def get(self, stem: Tokens) -> KVCache:
        """Return the keys and values of a stem, computed unless it is the last one."""
        if self._last is None or self._last[0] != stem:
            self._last = None  # frees its memory
            cache = self._model.new_cache(1, len(stem))
            self._model.hidden(torch.tensor([stem], device=self._model.device), cache)
            self._last = (stem, cache)
            self.computed_tokens += len(stem)
        return self._last[1]
