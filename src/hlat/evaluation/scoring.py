"""Scoring: log-probabilities of continuations after contexts, with shared prefixes computed once.

    ScoreRequest (context, continuation)
      --sorted by tokens--> rows: requests whose contexts are mostly equal, one token tree each
      --neighbours with a long common prefix--> families: the prefix is their stem, computed once
      --by length--> batches of rows with the same stem                                          plan_batches
    batch -> token trees -> [ KV cache of the stem ] -> hidden states of all nodes in one forward pass
      -> those before scored tokens -> head -> log-probabilities -> a sum for each request       Scorer

    the cat sat    -->  the -+- cat -+- sat      a token tree in preorder: the cat sat ran dog
    the cat ran              |       +- ran      a node attends to its ancestors and itself, and has the position of
    the dog                  +- dog              its depth: j is an ancestor of i (or i itself) if j <= i < end[j]

Everything is token ids: how they were made is not known here. A plan depends on the requests and the limits only, not
on ranks and on what has been computed before. So each request is computed in the same batch, and gets the same bits,
in any number of processes and after an interruption. The head runs for scored tokens only: logits of contexts, which
are most of the work of a small model, are never built.

Tensor suffixes: B rows, S nodes of a row, T stem and nodes, N scored tokens, D model width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hlat.model import KVCache
from hlat.parallel import ForwardModel
from hlat.runtime.distributed.sendable_types import sendable

Item = TypeVar("Item")
Tokens = tuple[int, ...]


@sendable
@dataclass(frozen=True)
class ScoreRequest:
    """A continuation to score after a context."""

    context: Tokens  # tokens before it, at least one; their own probability is not scored
    continuation: Tokens  # tokens to score, at least one

    @property
    def inputs(self) -> Tokens:
        # All tokens but the last, whose successor is not scored.
        return self.context + self.continuation[:-1]

    def truncated(self, longest: int) -> "ScoreRequest":
        """Drop tokens from the left, so that the model reads ``longest`` tokens at most."""
        excess = len(self.context) + len(self.continuation) - longest - 1
        if excess <= 0:
            return self
        tokens = (self.context + self.continuation)[excess:]
        # A continuation that is longer itself keeps all its tokens that have a context.
        first = max(1, len(self.context) - excess)
        return ScoreRequest(tokens[:first], tokens[first:])


@sendable
@dataclass(frozen=True)
class Score:
    """Log-likelihood of a continuation, and whether it is the greedy one."""

    log_probability: float  # sum over its tokens, in nats
    is_greedy: bool  # True if every token is the most likely one after those before it
    tokens: int


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TokenTree:
    """A tree of tokens in preorder. Trees of a batch may share a stem: tokens before the first node of each."""

    tokens: IntArray  # token of each node
    depths: IntArray  # position of each node, counted from the first token of the stem
    ends: IntArray  # index after the last descendant of each node
    paths: list[IntArray]  # nodes of each sequence that the tree was built from, in the order given
    stem: int  # number of tokens before the tree

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        # Every node has one child at most, so that plain causal attention computes the tree.
        return bool((self.ends == self.size).all()) and self.size == int(self.depths[-1]) + 1 - self.stem

    def mask(self, window: int | None) -> BoolArray:
        """Nodes and tokens of the stem that each node attends to, itself included: (nodes, stem + nodes), bool."""
        node = np.arange(self.size)
        below = (node[None, :] <= node[:, None]) & (node[:, None] < self.ends[None, :])
        mask = np.concatenate((np.ones((self.size, self.stem), dtype=np.bool_), below), axis=1)
        if window is not None:
            # By depth, not by index: siblings lie between a node and its ancestors.
            depths = np.concatenate((np.arange(self.stem), self.depths))
            mask &= self.depths[:, None] - depths[None, :] < window
        return mask


def build_tree(sequences: Sequence[Sequence[int]], stem: int = 0) -> TokenTree:
    """Build the tree of sequences whose first ``stem`` tokens are equal; each is longer than the stem."""
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    paths: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    path: list[int] = []
    before: Sequence[int] = ()
    # Sorted, neighbours share the longest prefixes: that is the tree in preorder.
    for index in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
        sequence = sequences[index][stem:]
        shared = common_prefix(before, sequence)
        for node in path[shared:]:
            ends[node] = len(tokens)
        del path[shared:]
        new = len(sequence) - shared
        path.extend(range(len(tokens), len(tokens) + new))
        tokens.extend(sequence[shared:])
        depths.extend(range(stem + shared, stem + len(sequence)))
        ends.extend([0] * new)
        paths[index] = np.array(path, dtype=np.int64)
        before = sequence
    for node in path:
        ends[node] = len(tokens)
    return TokenTree(np.array(tokens), np.array(depths), np.array(ends), paths, stem)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that two sequences have in common."""
    length = min(len(one), len(other))
    low, high = 0, length  # one[:low] is equal; comparing slices is faster than a loop over tokens
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_SHORTEST_STEM = 24  # tokens: what a stem saves has to be worth a forward pass of its own
_MOST_LEVELS = 64  # of nested stems: their lengths are rounded down to a multiple of the longest / 64


@dataclass(frozen=True)
class Member:
    """Facts that decide about the family of a sequence, or of several that are computed in one row."""

    tokens: Tokens  # the sequence, or the first of them
    most_stem: int  # number of tokens at the beginning that a stem may have
    size: int  # number of tokens to compute if there is no stem


def find_families(members: Sequence[Member]) -> list[tuple[int, range]]:
    """Divide members, sorted by tokens, into families: length of the stem (0 for a member alone), and indices."""
    if not members:
        return []
    step = max(1, max(member.most_stem for member in members) // _MOST_LEVELS)
    shared = [
        min(common_prefix(left.tokens, right.tokens), left.most_stem, right.most_stem)
        for left, right in pairwise(members)
    ]
    levels = [count // step * step if count >= _SHORTEST_STEM else 0 for count in shared]
    return _divide(members, levels, 0, len(members))[1]


def _divide(
    members: Sequence[Member], levels: Sequence[int], start: int, stop: int
) -> tuple[int, list[tuple[int, range]]]:
    """Divide the members from ``start`` to ``stop``; return the tokens to compute, and the families."""
    total = sum(member.size for member in members[start:stop])
    if stop - start == 1:
        return total, [(0, range(start, stop))]
    stem = min(levels[start : stop - 1])
    together = total - stem * (stop - start - 1)
    whole = [(stem, range(start, stop))]
    cuts = [start, *(index + 1 for index in range(start, stop - 1) if levels[index] == stem), stop]
    if len(cuts) == stop - start + 1:  # all neighbours share the same, so no part of them saves more
        return (together, whole) if stem else (total, [(0, range(index, index + 1)) for index in range(start, stop)])
    parts = [_divide(members, levels, low, high) for low, high in pairwise(cuts)]
    apart = sum(part[0] for part in parts)
    if stem and together <= apart:
        return together, whole
    return apart, [family for part in parts for family in part[1]]


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch of continuations that are scored together."""

    tokens: int = 2048  # most tokens of a forward pass, padding included; a single row may have more
    cached: int = 32_768  # most positions in the KV cache of a batch, with those of the stem
    row: int = 512  # most tokens of a row that has several contexts


@sendable
@dataclass(frozen=True)
class ScoringBatch:
    """Rows of requests, whose first ``stem`` tokens are the same in all rows."""

    stem: int  # number of tokens; 0 for none
    rows: list[list[ScoreRequest]]  # the requests of each row
    order: list[int]  # index of each request, row after row, in the list that was planned

    @property
    def requests(self) -> list[ScoreRequest]:
        return [request for row in self.rows for request in row]

    def without(self, is_stored: Callable[[int], bool]) -> "ScoringBatch":
        """Leave out the requests whose index is stored."""
        indices = iter(self.order)
        rows = [[request for request in row if not is_stored(next(indices))] for row in self.rows]
        return replace(self, rows=[row for row in rows if row], order=[it for it in self.order if not is_stored(it)])


@dataclass(frozen=True)
class _Row:
    """Requests of one row: their indices, and what decides about their stem."""

    indices: list[int]
    member: Member


def plan_batches(requests: Sequence[ScoreRequest], limits: BatchLimits | None = None) -> list[ScoringBatch]:
    """Divide requests into batches, in the order in which they should be computed."""
    limits = limits or BatchLimits()
    rows = _rows(requests, limits)
    alone, batches = [], []
    for stem, indices in find_families([row.member for row in rows]):
        family = [rows[index] for index in indices]
        if stem == 0:
            alone += family
        else:
            batches += _cut_into_batches(requests, family, stem, limits)
    return _cut_into_batches(requests, alone, 0, limits) + batches


def _rows(requests: Sequence[ScoreRequest], limits: BatchLimits) -> list[_Row]:
    # A row collects neighbours that share at least half of their tokens.
    inputs = [request.inputs for request in requests]
    rows: list[_Row] = []
    for index in sorted(range(len(requests)), key=lambda index: (inputs[index], requests[index].continuation)):
        tokens, most_stem = inputs[index], len(requests[index].context) - 1
        if rows:
            last = rows[-1].member
            shared = common_prefix(inputs[rows[-1].indices[-1]], tokens)
            size = last.size + len(tokens) - shared
            if 2 * shared >= len(tokens) and size <= max(limits.row, len(last.tokens)):
                member = Member(last.tokens, min(last.most_stem, shared, most_stem), size)
                rows[-1] = _Row([*rows[-1].indices, index], member)
                continue
        rows.append(_Row([index], Member(tokens, most_stem, len(tokens))))
    return rows


def _cut_into_batches(
    requests: Sequence[ScoreRequest], rows: list[_Row], stem: int, limits: BatchLimits
) -> list[ScoringBatch]:
    def fits(count: int, widest: int) -> bool:
        return count * (widest - stem) <= limits.tokens and count * widest <= limits.cached

    return [
        ScoringBatch(
            stem,
            [[requests[index] for index in row.indices] for row in batch],
            [index for row in batch for index in row.indices],
        )
        for batch in cut_by_size(rows, lambda row: row.member.size, fits)
    ]


def cut_by_size(
    items: Iterable[Item], size: Callable[[Item], int], fits: Callable[[int, int], bool]
) -> list[list[Item]]:
    """Divide items into batches, the largest first; ``fits`` judges a batch by its number and its largest size."""
    batches: list[list[Item]] = []
    # Largest first, so that a lack of memory shows at once.
    for item in sorted(items, key=lambda item: -size(item)):
        if batches and fits(len(batches[-1]) + 1, size(batches[-1][0])):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


class StemCache:
    """KV cache of the last stem, because batches with the same stem follow each other."""

    def __init__(self, model: ForwardModel) -> None:
        self._model = model
        self._last: tuple[Tokens, KVCache] | None = None

    def get(self, stem: Tokens) -> KVCache:
        """Return the keys and values of a stem, computed unless it is the last one."""
        if self._last is None or self._last[0] != stem:
            self._last = None  # frees its memory
            cache = self._model.new_cache(1, len(stem))
            self._model.hidden(torch.tensor([stem], device=self._model.device), cache)
            self._last = (stem, cache)
        return self._last[1]


class Scorer:
    """Scores batches on one model, or on this rank's shard of it; tensor-parallel ranks score the same batches."""

    def __init__(self, model: ForwardModel) -> None:
        self._model = model
        self._stems = StemCache(model)

    def score(self, batch: ScoringBatch) -> list[Score]:
        trees = [build_tree([request.inputs for request in row], batch.stem) for row in batch.rows]
        hidden_BSD = self._hidden(batch, trees)
        places: list[IntArray] = []
        targets: list[int] = []
        counts: list[int] = []
        for index, (row, tree) in enumerate(zip(batch.rows, trees, strict=True)):
            for request, path in zip(row, tree.paths, strict=True):
                places.append(index * hidden_BSD.shape[1] + path[-len(request.continuation) :])
                targets += request.continuation
                counts.append(len(request.continuation))
        device = hidden_BSD.device
        hidden_ND = hidden_BSD.flatten(0, 1)[torch.from_numpy(np.concatenate(places)).to(device)]
        # Only before scored tokens: logits of whole contexts would be most of the work of a small model.
        log_N, greedy_N = self._model.log_probabilities(hidden_ND, torch.tensor(targets, device=device))
        parts = zip(log_N.cpu().double().split(counts), greedy_N.cpu().split(counts), counts, strict=True)
        return [Score(float(log_n.sum()), bool(greedy_n.all()), count) for log_n, greedy_n, count in parts]

    def _hidden(self, batch: ScoringBatch, trees: Sequence[TokenTree]) -> torch.Tensor:
        """Hidden states of all nodes: (B, S, D); rows are padded on the right, where nothing attends to."""
        rows, width, device = len(trees), max(tree.size for tree in trees), self._model.device
        tokens_BS = torch.zeros((rows, width), dtype=torch.int64)
        for index, tree in enumerate(trees):
            tokens_BS[index, : tree.size] = torch.from_numpy(tree.tokens)
        tokens_BS = tokens_BS.to(device)
        chains = all(tree.is_chain for tree in trees)
        if chains and batch.stem == 0:
            return self._model.hidden(tokens_BS)
        cache = self._model.new_cache(rows, batch.stem + width)
        if batch.stem:
            cache.start_with(self._stems.get(batch.requests[0].inputs[: batch.stem]))
        if chains:
            return self._model.hidden(tokens_BS, cache)
        positions_BS = torch.zeros((rows, width), dtype=torch.int64)
        for index, tree in enumerate(trees):
            positions_BS[index, : tree.size] = torch.from_numpy(tree.depths)
        windows = self._model.decoder.windows
        cache.attend_to({window: _mask(trees, width, batch.stem, window).to(device) for window in windows})
        return self._model.hidden(tokens_BS, cache, positions_BS.to(device))


def _mask(trees: Sequence[TokenTree], width: int, stem: int, window: int | None) -> torch.Tensor:
    """Places that each node of each tree attends to, with a window: bool (B, width, stem + width)."""
    mask_BST = torch.zeros((len(trees), width, stem + width), dtype=torch.bool)
    mask_BST.diagonal(stem, 1, 2).fill_(True)  # padding attends to itself: softmax over nothing is NaN
    for index, tree in enumerate(trees):
        mask_BST[index, : tree.size, : stem + tree.size] = torch.from_numpy(tree.mask(window))
    return mask_BST


def score_all(model: ForwardModel, requests: Sequence[ScoreRequest], limits: BatchLimits | None = None) -> list[Score]:
    """Score requests in this process, in their order."""
    scorer = Scorer(model)
    scores: list[Score | None] = [None] * len(requests)
    for batch in plan_batches(requests, limits):
        for index, score in zip(batch.order, scorer.score(batch), strict=True):
            scores[index] = score
    return [score for score in scores if score is not None]
