"""Responses to requests: those that are stored are looked up, the others are computed in batches and stored.

requests -> distinct ones -> plan of batches -> rounds: a batch for each replica -> stored -> responses, in order

The plan has all requests, also those with a stored response: after an interruption, the remaining batches are the ones
that the uninterrupted evaluation would have computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hlat.evaluation.responses.kinds import Batch, Request, RequestKind, Response
from hlat.evaluation.responses.replicas import Replicas
from hlat.evaluation.responses.response_cache import ResponseCache, response_key

Progress = Callable[[str, int, int], None]
"""Called with what is done ("texts generated"), how many are done, and how many there are."""


class Responder:
    """Answers requests on rank 0.

    Args:
        replicas: replicas of the model, which compute.
        cache: responses that are stored, and where new ones are stored.
        progress: called after each round.

    Attributes:
        computed, looked_up: number of distinct requests that were computed, and that had a stored response.
    """

    def __init__(self, replicas: Replicas, cache: ResponseCache, progress: Progress) -> None:
        self._replicas, self._cache, self._progress = replicas, cache, progress
        self.computed = self.looked_up = 0

    def respond(self, kind: RequestKind[Request, Batch, Response], requests: Sequence[Request]) -> list[Response]:
        """Answer requests of one kind, in their order."""
        keys = [response_key(request) for request in requests]
        distinct = dict(zip(keys, requests, strict=True))
        planned = list(distinct)
        stored = {key for key in planned if key in self._cache}
        self.looked_up += len(stored)
        batches = []
        for batch in kind.plan(list(distinct.values())):
            rest = kind.without(batch, lambda index: planned[index] in stored)
            if rest.order:
                batches.append(rest)
        done = len(stored)
        for start in range(0, len(batches), self._replicas.count):
            done += self._compute(kind, planned, batches[start : start + self._replicas.count])
            self._progress(kind.title, done, len(planned))
        return [kind.from_json(self._cache[key]) for key in keys]

    def _compute(
        self, kind: RequestKind[Request, Batch, Response], planned: Sequence[str], batches: Sequence[Batch]
    ) -> int:
        """Compute and store a round of batches; return the number of requests in it."""
        responses: dict[str, Any] = {}
        for batch, answers in zip(batches, self._replicas.compute(kind.name, batches), strict=True):
            for index, answer in zip(batch.order, answers, strict=True):
                responses[planned[index]] = kind.to_json(answer)
        self._cache.add(responses)
        self.computed += len(responses)
        return len(responses)
