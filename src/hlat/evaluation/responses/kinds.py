"""Kinds of requests: how they are planned in batches, and how their responses are stored as JSON."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any, Generic, TypeVar

from hlat.evaluation.batch_generation.requests import (
    GenerationBatch,
    GenerationLimits,
    GenerationRequest,
    plan_generation,
)
from hlat.evaluation.scoring.batches import BatchLimits, ScoringBatch, plan_batches
from hlat.evaluation.scoring.requests import Score, ScoreRequest

Request = TypeVar("Request", ScoreRequest, GenerationRequest)
Batch = TypeVar("Batch", ScoringBatch, GenerationBatch)
Response = TypeVar("Response")


class RequestKind(ABC, Generic[Request, Batch, Response]):
    """One kind of requests.

    Attributes:
        name: name of the kind, by which replicas know it.
        title: what its requests are called in progress messages.
    """

    name: str
    title: str

    @abstractmethod
    def plan(self, requests: Sequence[Request]) -> list[Batch]:
        """Divide requests into batches."""

    @abstractmethod
    def without(self, batch: Batch, is_stored: Callable[[int], bool]) -> Batch:
        """Return a batch without the requests whose index in the plan is stored."""

    @abstractmethod
    def to_json(self, response: Response) -> Any:
        """Return a response as a JSON value."""

    @abstractmethod
    def from_json(self, value: Any) -> Response:
        """Return the response that ``to_json`` has encoded."""


class Scoring(RequestKind[ScoreRequest, ScoringBatch, Score]):
    """Requests to score continuations.

    Args:
        limits: limits of a batch.
    """

    name, title = "score", "continuations scored"

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits

    def plan(self, requests: Sequence[ScoreRequest]) -> list[ScoringBatch]:
        """Divide requests into batches; see ``plan_batches``."""
        return plan_batches(requests, self._limits)

    def without(self, batch: ScoringBatch, is_stored: Callable[[int], bool]) -> ScoringBatch:
        """Return a batch without stored requests; see ``RequestKind.without``."""
        indices = iter(batch.order)
        rows = [[request for request in row if not is_stored(next(indices))] for row in batch.rows]
        order = [index for index in batch.order if not is_stored(index)]
        return replace(batch, rows=[row for row in rows if row], order=order)

    def to_json(self, response: Score) -> Any:
        """Return a score as a list."""
        return list(astuple(response))

    def from_json(self, value: Any) -> Score:
        """Return the score of a list."""
        return Score(*value)


class Generation(RequestKind[GenerationRequest, GenerationBatch, list[int]]):
    """Requests to continue texts.

    Args:
        limits: limits of a batch.
    """

    name, title = "generate", "texts generated"

    def __init__(self, limits: GenerationLimits) -> None:
        self._limits = limits

    def plan(self, requests: Sequence[GenerationRequest]) -> list[GenerationBatch]:
        """Divide requests into batches; see ``plan_generation``."""
        return plan_generation(requests, self._limits)

    def without(self, batch: GenerationBatch, is_stored: Callable[[int], bool]) -> GenerationBatch:
        """Return a batch without stored requests; see ``RequestKind.without``."""
        pairs = [pair for pair in zip(batch.order, batch.requests, strict=True) if not is_stored(pair[0])]
        return replace(batch, order=[index for index, _ in pairs], requests=[request for _, request in pairs])

    def to_json(self, response: list[int]) -> Any:
        """Return the tokens of a text."""
        return response

    def from_json(self, value: Any) -> list[int]:
        """Return the tokens of a text."""
        return [int(token) for token in value]
