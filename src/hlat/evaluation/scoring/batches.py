"""Batches of requests: what is shared is computed once, and rows of a batch have similar lengths.

    requests --sorted by tokens--> rows: requests whose contexts are mostly equal, one token tree each
        --neighbours with a long common prefix--> families: the prefix is their stem, computed once
        --by length--> batches of rows with the same stem

A plan depends on the requests and the limits only, not on ranks and on what has been computed before. So each request
is computed in the same batch, and gets the same bits, in any number of processes and after an interruption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hlat.evaluation.scoring.requests import ScoreRequest, Tokens
from hlat.evaluation.scoring.token_tree import build_tree, common_prefix
from hlat.runtime.distributed import sendable

_SHORTEST_STEM = 24  # tokens: what a stem saves has to be worth a forward pass of its own
_MOST_LEVELS = 64  # of nested stems: their lengths are rounded down to a multiple of the longest / 64


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch.

    Attributes:
        tokens: most tokens of a forward pass, padding included; a single row may have more.
        cached: most positions in the KV cache of a batch, with those of the stem.
        row: most tokens of a row that has several contexts.
    """

    tokens: int = 2048
    cached: int = 32_768
    row: int = 1024


@sendable
@dataclass(frozen=True)
class ScoringBatch:
    """A batch: rows of requests, whose first ``stem`` tokens are the same in all rows.

    Attributes:
        stem: number of tokens; 0 for none.
        rows: the requests of each row.
        order: index of each request, row after row, in the list that was planned.
    """

    stem: int
    rows: list[list[ScoreRequest]]
    order: list[int]

    @property
    def requests(self) -> list[ScoreRequest]:
        """All requests, row after row."""
        return [request for row in self.rows for request in row]


@dataclass(frozen=True)
class _Row:
    """Requests of one row, and what decides about their stem.

    Attributes:
        members: indices of the requests.
        first: tokens of the first of them.
        shared: number of tokens that a stem may have: a prefix of all contexts, without the last token of each.
        size: nodes of the tree.
    """

    members: list[int]
    first: Tokens
    shared: int
    size: int


def plan_batches(requests: Sequence[ScoreRequest], limits: BatchLimits | None = None) -> list[ScoringBatch]:
    """Divide requests into batches, in the order in which they should be computed."""
    limits = limits or BatchLimits()
    rows = _rows(requests, limits)
    batches = []
    alone: list[_Row] = []
    for stem, members in _families(rows):
        if stem == 0:
            alone += members
        else:
            batches += _cut(requests, members, stem, limits)
    return _cut(requests, alone, 0, limits) + batches


def _rows(requests: Sequence[ScoreRequest], limits: BatchLimits) -> list[_Row]:
    """Collect requests in rows: neighbours that share at least half of their tokens."""
    inputs = [request.inputs for request in requests]
    order = sorted(range(len(requests)), key=lambda index: (inputs[index], requests[index].continuation))
    rows: list[_Row] = []
    for index in order:
        tokens = inputs[index]
        scored_from = len(requests[index].context) - 1
        last = rows[-1] if rows else None
        shared = 0 if last is None else min(common_prefix(inputs[last.members[-1]], tokens), len(tokens))
        size = len(tokens) if last is None else last.size + len(tokens) - shared
        if last is not None and 2 * shared >= len(tokens) and size <= max(limits.row, len(last.first)):
            common = min(last.shared, shared, scored_from)
            rows[-1] = _Row([*last.members, index], last.first, common, size)
        else:
            rows.append(_Row([index], tokens, scored_from, len(tokens)))
    return rows


def _families(rows: list[_Row]) -> list[tuple[int, list[_Row]]]:
    """Divide sorted rows into families with a common stem; rows without one are families of stem 0."""
    if not rows:
        return []
    step = max(1, max(row.shared for row in rows) // _MOST_LEVELS)
    levels = []
    for left, right in pairwise(rows):
        shared = min(common_prefix(left.first, right.first), left.shared, right.shared)
        levels.append(shared // step * step if shared >= _SHORTEST_STEM else 0)
    return _divide(rows, levels, 0, len(rows))[1]


def _divide(rows: list[_Row], levels: list[int], start: int, stop: int) -> tuple[int, list[tuple[int, list[_Row]]]]:
    """Divide rows into families so that the fewest tokens are computed; return their number and the families."""
    members = rows[start:stop]
    total = sum(row.size for row in members)
    if len(members) == 1:
        return total, [(0, members)]
    stem = min(levels[start : stop - 1])
    together = total - stem * (len(members) - 1)
    cuts = [start, *(i + 1 for i in range(start, stop - 1) if levels[i] == stem), stop]
    if len(cuts) == stop - start + 1:  # every neighbour shares the same: nothing smaller saves more
        return (together, [(stem, members)]) if stem else (total, [(0, [row]) for row in members])
    parts = [_divide(rows, levels, low, high) for low, high in pairwise(cuts)]
    apart = sum(part[0] for part in parts)
    if stem and together <= apart:
        return together, [(stem, members)]
    return apart, [family for part in parts for family in part[1]]


def _cut(requests: Sequence[ScoreRequest], rows: list[_Row], stem: int, limits: BatchLimits) -> list[ScoringBatch]:
    """Cut rows with the same stem into batches, longest rows first, so that a lack of memory shows at once."""
    batches: list[ScoringBatch] = []
    pending: list[_Row] = []
    for row in sorted(rows, key=lambda row: -row.size):
        widest = (pending[0] if pending else row).size - stem
        count = len(pending) + 1
        if pending and (count * widest > limits.tokens or count * (widest + stem) > limits.cached):
            batches.append(_batch(requests, pending, stem))
            pending = []
        pending.append(row)
    if pending:
        batches.append(_batch(requests, pending, stem))
    return batches


def _batch(requests: Sequence[ScoreRequest], rows: list[_Row], stem: int) -> ScoringBatch:
    members = [[requests[index] for index in row.members] for row in rows]
    return ScoringBatch(stem, members, [index for row in rows for index in row.members])


def count_tokens(batch: ScoringBatch) -> int:
    """Count the tokens that a batch computes, without padding and without the stem."""
    return sum(build_tree([request.inputs for request in row], batch.stem).size for row in batch.rows)
