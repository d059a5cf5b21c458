"""Batches of requests: what is shared is computed once, and rows of a batch have similar lengths.

    requests --sorted by tokens--> rows: requests whose contexts are mostly equal, one token tree each
        --neighbours with a long common prefix--> families: the prefix is their stem, computed once
        --by length--> batches of rows with the same stem

A plan depends on the requests and the limits only, not on ranks and on what has been computed before. So each request
is computed in the same batch, and gets the same bits, in any number of processes and after an interruption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hlat.evaluation.scoring.families import Member, find_families
from hlat.evaluation.scoring.requests import ScoreRequest
from hlat.evaluation.scoring.token_tree import common_prefix
from hlat.runtime.distributed.sendable_types import sendable


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
    row: int = 512


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
            batches += _cut(requests, family, stem, limits)
    return _cut(requests, alone, 0, limits) + batches


def _rows(requests: Sequence[ScoreRequest], limits: BatchLimits) -> list[_Row]:
    """Collect requests in rows: neighbours that share at least half of their tokens."""
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


def _cut(requests: Sequence[ScoreRequest], rows: list[_Row], stem: int, limits: BatchLimits) -> list[ScoringBatch]:
    """Cut rows with the same stem into batches, longest rows first, so that a lack of memory shows at once."""
    batches: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -row.member.size):
        count = len(batches[-1]) + 1 if batches else 1
        widest = (batches[-1][0] if batches else row).member.size
        if batches and count * (widest - stem) <= limits.tokens and count * widest <= limits.cached:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_batch(requests, batch, stem) for batch in batches]


def _batch(requests: Sequence[ScoreRequest], rows: list[_Row], stem: int) -> ScoringBatch:
    members = [[requests[index] for index in row.indices] for row in rows]
    return ScoringBatch(stem, members, [index for row in rows for index in row.indices])
