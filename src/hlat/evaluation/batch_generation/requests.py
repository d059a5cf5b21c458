"""Requests to continue a text, and batches of them.

    requests --same settings, common prefix--> families with a stem --by length--> batches, computed as one

A plan depends on the requests and the limits only (see ``scoring.batches``). Sampled tokens depend on seed, context,
repeat and position, and so not even on that.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hlat.evaluation.sampling import Sampling
from hlat.evaluation.scoring.families import Member, find_families
from hlat.evaluation.scoring.requests import Tokens
from hlat.runtime.distributed.sendable_types import sendable


@sendable
@dataclass(frozen=True)
class GenerationRequest:
    """A context to continue.

    Attributes:
        context: tokens of the context, at least one.
        max_tokens: most new tokens.
        stop: texts at which generation ends.
        sampling: how tokens are chosen.
        repeat: number of the same request before this one, which gets other samples.
    """

    context: Tokens
    max_tokens: int
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    repeat: int = 0

    @cached_property
    def names(self) -> tuple[str, int]:
        """Names under which its random numbers are drawn."""
        digest = hashlib.sha256(np.array(self.context, dtype="<u4").tobytes()).hexdigest()
        return digest, self.repeat

    @property
    def settings(self) -> tuple[object, ...]:
        """Settings that all requests of a batch have in common."""
        return self.max_tokens, self.stop, self.sampling.temperature, self.sampling.seed, repr(self.sampling)


@sendable
@dataclass(frozen=True)
class GenerationBatch:
    """Requests with the same settings, whose contexts begin with the same ``stem`` tokens.

    Attributes:
        stem: number of tokens; 0 for none.
        requests: the requests, longest context first.
        order: index of each request in the list that was planned.
    """

    stem: int
    requests: list[GenerationRequest]
    order: list[int]


@dataclass(frozen=True)
class GenerationLimits:
    """Limits of a batch.

    Attributes:
        rows: most texts that are generated together.
        cached: most positions in the KV cache of a batch; a single text may have more.
    """

    rows: int = 64
    cached: int = 65_536


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
                batches += _cut(requests, family, stem, limits)
        batches += _cut(requests, alone, 0, limits)
    return batches


def _cut(
    requests: Sequence[GenerationRequest], family: Sequence[int], stem: int, limits: GenerationLimits
) -> list[GenerationBatch]:
    batches: list[list[int]] = []
    for index in sorted(family, key=lambda index: -len(requests[index].context)):
        if batches:
            first = requests[batches[-1][0]]
            count, positions = len(batches[-1]) + 1, len(first.context) + first.max_tokens
            if count <= limits.rows and count * positions <= limits.cached:
                batches[-1].append(index)
                continue
        batches.append([index])
    return [GenerationBatch(stem, [requests[index] for index in batch], batch) for batch in batches]
