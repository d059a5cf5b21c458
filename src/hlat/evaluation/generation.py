"""Autoregressive text generation: of one text, and of many texts together.

    generate:  prompt -> tokens -> [ model with KV cache -> logits of the last position -> next token ] -> text

    plan_generation:  requests --same settings, common prefix--> families with a stem --by length--> batches
    BatchGenerator:   contexts -> [stem, computed once | padding | rest of the context] in the KV cache, all rows end
                          at the same position
                      -> logits of the last position -> next token of each row -> appended, until the row has ended
                      -> rows that have ended are removed from the cache when they are a quarter of it

A plan depends on the requests and the limits only (see ``scoring.plan_batches``). Sampled tokens depend on seed,
context, repeat and position, and so not even on that. Padding is between stem and rest: the mask hides it, and
positions do not count it.

Tensor suffixes: B rows, S positions of a call, T positions in the cache, D model width, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from hlat.checkpoint import end_token_ids, load_model, open_checkpoint, read_tokenizer, resolve
from hlat.evaluation.next_token import Sampling, choose_token, choose_tokens, decode_on_device, fast_decoding
from hlat.evaluation.scoring import Member, StemCache, Tokens, cut_by_size, find_families
from hlat.model import Decoder, KVCache
from hlat.parallel import ForwardModel
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import join_run
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    end_ids: Collection[int] = (),
) -> list[int]:
    """Continue a prompt, of at least one token; return the new token ids. Greedy without ``sampling``.

    Generation ends after ``max_tokens`` new tokens, at one of ``end_ids``, which is not returned, or when prompt and
    new tokens reach the model's ``max_sequence_length``: positions beyond it were never trained.

    If ``max_tokens`` allows ``FEWEST_TOKENS`` (24) or more new tokens, a CPU multiplies by packed weights, which rounds
    differently. So where two tokens are almost equally likely, a greedy text may depend on ``max_tokens``.

    Raises:
        DataError: the prompt is empty, or leaves no room for a new token, or no new token is asked for.
    """
    total = _total_length(len(prompt), max_tokens, model.config.max_sequence_length)
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    # A recorded step has one table of rotations.
    if backend_of(device).has_graphs and not model.depends_on_length(total):
        return decode_on_device(model, prompt, total - len(prompt), sampling, end_ids)
    dtype = model.compute or next(model.parameters()).dtype
    cache = KVCache(model.config, 1, total, device, dtype)
    assert model.head is not None, "the model is complete"
    tokens = list(prompt)
    new = torch.tensor([tokens], device=device)
    with fast_decoding(model, total - len(prompt)):
        for index in range(total - len(prompt)):
            logits_V = model.head(model.hidden(new, cache=cache)[0, -1])
            token = choose_token(logits_V, sampling, index)
            if token in end_ids:
                break
            tokens.append(token)
            new = torch.tensor([[token]], device=device)
    return tokens[len(prompt) :]


def _total_length(prompt: int, max_tokens: int, longest: int | None) -> int:
    if not prompt:
        raise DataError("the prompt has no tokens. Give at least one character.")
    if max_tokens < 1:
        raise DataError(f"max_tokens {max_tokens} must be 1 or above.")
    if longest is None:
        return prompt + max_tokens
    if prompt >= longest:
        raise DataError(
            f"the prompt has {prompt} tokens, and the model's limit is {longest} (model.max_sequence_length). "
            f"Shorten the prompt to {longest - 1} tokens at most."
        )
    return min(prompt + max_tokens, longest)


def generate_text(
    checkpoint: str | Path, prompt: str, max_tokens: int, sampling: Sampling | None = None, weights: str = "model"
) -> str:
    """Load a checkpoint on this machine's device and continue a text, encoded as in training.

    Raises:
        CheckpointError: the folder has no valid checkpoint, or the checkpoint has no tokenizer.
        DataError: the prompt has no tokens, or too many for the model.
    """
    folder = resolve(Path(checkpoint))
    ends = end_token_ids(open_checkpoint(folder))
    # End tokens are read above; an imported tokenizer may define none.
    tokenizer = read_tokenizer(folder, eos_token=None)
    tokens = tokenizer.encode_prompt(prompt)
    model, _ = load_model(folder, join_run().device, weights=weights)
    return tokenizer.decode(generate(model, tokens, max_tokens, sampling, end_ids=ends))


@sendable
@dataclass(frozen=True)
class GenerationRequest:
    """Context of at least one token, and how to continue it."""

    context: Tokens
    max_tokens: int  # most new tokens
    stop: tuple[str, ...] = ()  # texts at which generation ends
    sampling: Sampling = field(default_factory=Sampling)
    repeat: int = 0  # number of the same request before this one, which gets other samples

    @cached_property
    def names(self) -> tuple[str, int]:
        # Random numbers are drawn under these names: they depend on the context, not on the batch.
        digest = hashlib.sha256(np.array(self.context, dtype="<u4").tobytes()).hexdigest()
        return digest, self.repeat

    @property
    def settings(self) -> tuple[object, ...]:
        return self.max_tokens, self.stop, self.sampling.temperature, self.sampling.seed, repr(self.sampling)


@sendable
@dataclass(frozen=True)
class GenerationBatch:
    """Requests with the same settings and stem, longest context first."""

    stem: int  # number of tokens that all contexts begin with; 0 for none
    requests: list[GenerationRequest]
    order: list[int]  # index of each request in the list that was planned

    def without(self, is_stored: Callable[[int], bool]) -> "GenerationBatch":
        """Leave out the requests whose index is stored."""
        kept = [place for place, index in enumerate(self.order) if not is_stored(index)]
        return replace(self, requests=[self.requests[it] for it in kept], order=[self.order[it] for it in kept])


@dataclass(frozen=True)
class GenerationLimits:
    """Limits of a batch of texts that are generated together."""

    rows: int = 64  # most texts that are generated together
    cached: int = 65_536  # most positions in the KV cache of a batch; a single text may have more


def plan_generation(
    requests: Sequence[GenerationRequest], limits: GenerationLimits | None = None
) -> list[GenerationBatch]:
    """Divide requests into batches, in the order in which they should be computed."""
    limits = limits or GenerationLimits()
    order = sorted(range(len(requests)), key=lambda index: (requests[index].context, requests[index].repeat))
    settings = sorted({request.settings for request in requests}, key=repr)
    batches = []
    for setting in settings:
        same = [index for index in order if requests[index].settings == setting]
        members = [Member(tokens := requests[index].context, len(tokens) - 1, len(tokens)) for index in same]
        alone: list[int] = []
        for stem, places in find_families(members):
            family = [same[place] for place in places]
            if stem == 0:
                alone += family
            else:
                batches += _cut_into_batches(requests, family, stem, limits)
        batches += _cut_into_batches(requests, alone, 0, limits)
    return batches


def _cut_into_batches(
    requests: Sequence[GenerationRequest], family: Sequence[int], stem: int, limits: GenerationLimits
) -> list[GenerationBatch]:
    def length(index: int) -> int:
        return len(requests[index].context) + requests[index].max_tokens

    batches = cut_by_size(family, length, lambda n, longest: n <= limits.rows and n * longest <= limits.cached)
    return [GenerationBatch(stem, [requests[index] for index in batch], batch) for batch in batches]


_PREFILL_TOKENS = 2048  # tokens of a forward pass over contexts
_MORE_TOKENS = 8  # tokens in front of a stop text that are decoded with it: a token may be a part of a character


class BatchGenerator:
    """Generates batches on one model, or a rank's shard of it; tensor-parallel ranks generate the same ones."""

    def __init__(self, model: ForwardModel, end_ids: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._model, self._end_ids, self._decode = model, end_ids, decode
        self._stems = StemCache(model)

    def generate(self, batch: GenerationBatch) -> list[list[int]]:
        """Generate the new tokens of each request; a text ended by a stop text may have some characters after it."""
        rows = _Rows(self._model, batch)
        if batch.stem:
            rows.cache.start_with(self._stems.get(batch.requests[0].context[: batch.stem]))
        logits_BV = self._model.logits(rows.read_contexts())
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
            # Removing rows copies the cache: worth it once a quarter of them has ended.
            if 4 * len(left) <= 3 * len(rows.members):
                rows.keep(left)
                chosen = [chosen[place] for place in left]
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
    """The texts of a batch that have not ended, in the KV cache."""

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
        """Compute the contexts; return the hidden states of their last positions, (B, D)."""
        # Some rows at a time: activations of all would need too much memory. Here rows begin at the same position, so
        # that plain causal attention computes them; then they are moved to where they end at the same one.
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
        # Without padding every row attends to all places: no mask is needed.
        if not self._is_padded:
            return self._model.hidden(tokens_B1, self.cache)[:, -1]
        windows = self._model.decoder.windows
        self.cache.attend_to({window: self._mask(place + 1, window).to(device) for window in windows})
        positions_B1 = (place - self._padding_B)[:, None].to(device)
        return self._model.hidden(tokens_B1, self.cache, positions_B1)[:, -1]

    def keep(self, places: Sequence[int]) -> None:
        self.members = [self.members[place] for place in places]
        self._padding_B = self._padding_B[list(places)]
        self.cache = self.cache.select(places)

    def _mask(self, total: int, window: int | None) -> torch.Tensor:
        """Places in the cache that its last place attends to: (B, 1, T)."""
        place_T = torch.arange(total)
        is_stem_T, padding_B1 = place_T < self._stem, self._padding_B[:, None]
        mask_BT = is_stem_T | (place_T >= self._stem + padding_B1)
        if window is not None:
            position_BT = torch.where(is_stem_T, place_T, place_T - padding_B1)
            mask_BT &= total - 1 - padding_B1 - position_BT < window
        return mask_BT[:, None]
