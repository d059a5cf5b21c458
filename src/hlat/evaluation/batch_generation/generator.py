"""Generation of several texts together.

    contexts -> [stem, computed once | padding | rest of the context] in the KV cache, all rows end at the same position
        -> logits of the last position -> next token of each row -> appended, until the row has ended
        -> rows that have ended are removed from the cache when they are a quarter of it

Padding is on the left of the rest, between stem and rest: the mask hides it, and positions do not count it.

Tensor suffixes: B rows, S positions of a call, T positions in the cache, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from hlat.evaluation.batch_generation.requests import GenerationBatch, GenerationRequest
from hlat.evaluation.sampling import choose_tokens
from hlat.evaluation.scoring.stem_cache import StemCache
from hlat.parallel import ForwardModel

_PREFILL_TOKENS = 2048  # tokens of a forward pass over contexts
_MORE_TOKENS = 8  # tokens in front of a stop text that are decoded with it: a token may be a part of a character


class BatchGenerator:
    """Generates batches on one model, or on this rank's shard of it; tensor-parallel ranks generate the same batches.

    Args:
        model: the model.
        end_ids: tokens that end a text; they are not returned.
        decode: decodes tokens to text.
    """

    def __init__(self, model: ForwardModel, end_ids: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._model, self._end_ids, self._decode = model, end_ids, decode
        self._stems = StemCache(model)
        self._tokens = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens that forward passes have computed so far, without padding."""
        return self._tokens + self._stems.computed_tokens

    def generate(self, batch: GenerationBatch) -> list[list[int]]:
        """Generate the new tokens of each request.

        A text that ended at a stop text has all of its tokens, and possibly some characters after it.
        """
        rows = _Rows(self._model, batch)
        if batch.stem:
            rows.cache.start_with(self._stems.get(batch.requests[0].context[: batch.stem]))
        logits_BV = self._model.logits(rows.read_contexts())
        self._tokens += sum(len(request.context) - batch.stem for request in batch.requests)
        sampling = batch.requests[0].sampling
        texts: list[list[int]] = [[] for _ in batch.requests]
        ended = [False] * len(texts)
        for step in range(batch.requests[0].max_tokens):
            chosen = choose_tokens(logits_BV, sampling, step, [batch.requests[row].names for row in rows.members])
            for row, token in zip(rows.members, chosen, strict=True):
                if not ended[row]:
                    ended[row] = self._append(batch.requests[row], texts[row], token)
            left = [place for place, row in enumerate(rows.members) if not ended[row]]
            if not left:
                break
            if 4 * len(left) <= 3 * len(rows.members):
                rows.keep(left)
                chosen = [chosen[place] for place in left]
            self._tokens += len(left)
            logits_BV = self._model.logits(rows.read_tokens(chosen))
        return texts

    def _append(self, request: GenerationRequest, text: list[int], token: int) -> bool:
        """Append a token to a text; return True if the text has ended."""
        if token in self._end_ids:
            return True
        text.append(token)
        return len(text) >= request.max_tokens or self._has_stop(text, request.stop)

    def _has_stop(self, text: Sequence[int], stop: Sequence[str]) -> bool:
        if not stop:
            return False
        tail = text[-(max(len(each.encode()) for each in stop) + _MORE_TOKENS) :]
        found = self._decode(tail)
        if not any(each in found for each in stop):
            return False
        complete = self._decode(text)  # the first character of the tail may be part of another one
        return any(each in complete for each in stop)


class _Rows:
    """The texts of a batch that have not ended, in the KV cache.

    Attributes:
        members: index of each row in the batch.
        cache: their keys and values.
    """

    def __init__(self, model: ForwardModel, batch: GenerationBatch) -> None:
        self._model, self._stem = model, batch.stem
        self._rests = [request.context[batch.stem :] for request in batch.requests]
        self._width = max(map(len, self._rests))
        self._padding_B = torch.tensor([self._width - len(rest) for rest in self._rests])
        self._is_padded = bool(self._padding_B.any())
        self.members = list(range(len(self._rests)))
        length = batch.stem + self._width + batch.requests[0].max_tokens
        self.cache = model.new_cache(len(self._rests), length)

    def read_contexts(self) -> torch.Tensor:
        """Compute the contexts, some rows at a time; return the hidden states of their last positions, (B, D).

        Here rows begin at the same position, so that plain causal attention computes them; then they are moved to where
        they end at the same one.
        """
        count = max(1, _PREFILL_TOKENS // self._width)
        parts = []
        for start in range(0, len(self._rests), count):
            rests = self._rests[start : start + count]
            tokens_BS = torch.zeros((len(rests), max(map(len, rests))), dtype=torch.int64)
            for row, rest in enumerate(rests):
                tokens_BS[row, : len(rest)] = torch.tensor(rest)
            cache = self._model.new_cache(len(rests), self._stem + tokens_BS.shape[1])
            if self._stem:
                cache.start_with(self.cache.rows(0, 1))
            hidden_BSD = self._model.hidden(tokens_BS.to(self._model.device), cache)
            for row, rest in enumerate(rests):
                place = self._stem + self._width - len(rest)
                self.cache.put(start + row, place, cache, row, range(self._stem, self._stem + len(rest)))
            parts += [hidden_BSD[row, len(rest) - 1] for row, rest in enumerate(rests)]
        self.cache.advance(self._width)
        return torch.stack(parts)

    def read_tokens(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each row; return the hidden states, (B, D)."""
        device, place = self._model.device, self.cache.length
        tokens_B1 = torch.tensor(tokens, device=device)[:, None]
        if not self._is_padded:
            return self._model.hidden(tokens_B1, self.cache)[:, -1]
        self.cache.attend_to(self._mask(place + 1).to(device))
        positions_B1 = (place - self._padding_B)[:, None].to(device)
        return self._model.hidden(tokens_B1, self.cache, positions_B1)[:, -1]

    def keep(self, places: Sequence[int]) -> None:
        """Remove all rows but these."""
        self.members = [self.members[place] for place in places]
        self._padding_B = self._padding_B[list(places)]
        self.cache = self.cache.select(places)

    def _mask(self, total: int) -> torch.Tensor:
        """Places in the cache that its last place attends to: (B, 1, T)."""
        place_T = torch.arange(total)
        is_stem_T, padding_B1 = place_T < self._stem, self._padding_B[:, None]
        mask_BT = is_stem_T | (place_T >= self._stem + padding_B1)
        window = self._model.decoder.window
        if window is not None:
            position_BT = torch.where(is_stem_T, place_T, place_T - padding_B1)
            mask_BT &= total - 1 - padding_B1 - position_BT < window
        return mask_BT[:, None]
