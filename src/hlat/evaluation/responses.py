"""Responses of a model to requests: stored on disk, or computed by replicas of the model in any number of processes.

    folder -> this rank's shard of the model --> rank 0: the work, with a responder
                                             --> other ranks: serve until it is done

    requests -> distinct ones -> plan of batches -> rounds: a batch for each replica -> stored -> responses, in order
    rank 0: batches of a round --> every rank computes that of its replica --> gathered on rank 0
    request, identity of the model --response_key--> key     folder/<model>/<segment>.jsonl: key, response, checksum

The plan has all requests, also those with a stored response: after an interruption, the remaining batches are the ones
that the uninterrupted evaluation would have computed. Tensor-parallel ranks of a replica compute the same batch.
A round ends when every replica has computed its batch, so that rank 0 can store the responses.

Every process that writes has a segment of its own, so that evaluations may share a folder. A line that was being
written when its process was killed has no valid checksum and is ignored.
"""

import hashlib
import json
import os
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TextIO, TypeVar

import torch

from hlat.checkpoint import ModelSource, open_model
from hlat.config import ModelConfig
from hlat.data import Tokenizer
from hlat.evaluation.fast_decoding import prepare_to_generate
from hlat.evaluation.generation import (
    BatchGenerator,
    GenerationBatch,
    GenerationLimits,
    GenerationRequest,
    plan_generation,
)
from hlat.evaluation.scoring import BatchLimits, Score, Scorer, ScoreRequest, ScoringBatch, plan_batches
from hlat.parallel import build_forward_model
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import StorageError

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


_SUFFIX = ".jsonl"


class ResponseCache:
    """Responses of one model by key, in memory and on disk; a context that opens and closes the files.

    Args:
        folder: folder of all models' responses.
        model: identity of the model: a hash of its weights and of what else changes responses.

    Attributes:
        folder: folder of this model's responses.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder / model[:32]
        self._responses: dict[str, Any] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> "ResponseCache":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for segment in sorted(self.folder.glob(f"*{_SUFFIX}")):
                self._responses |= dict(_valid_lines(segment))
            name = f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            self._file = (self.folder / name).open("x", encoding="utf-8")
        except OSError as error:
            raise _refused(self.folder, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            name, empty = Path(self._file.name), self._file.tell() == 0
            self._file.close()
            if empty:
                name.unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        return key in self._responses

    def __getitem__(self, key: str) -> Any:
        return self._responses[key]

    def add(self, responses: Mapping[str, Any]) -> None:
        """Store responses: JSON values by key. They survive the end of the process, in whatever way it ends.

        Raises:
            StorageError: the disk refused the write.
        """
        assert self._file is not None, "used as a context"
        lines = [_line(key, value) for key, value in responses.items()]
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise _refused(self.folder, error) from error
        self._responses |= responses


def response_key(request: ScoreRequest | GenerationRequest) -> str:
    """Return the key of a request: a hash of all that decides about the response of a given model."""
    text = json.dumps([type(request).__name__, asdict(request)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _line(key: str, value: Any) -> str:
    content = json.dumps([key, value], separators=(",", ":"))
    return f"{zlib.crc32(content.encode()):08x} {content}\n"


def _valid_lines(segment: Path) -> Iterable[tuple[str, Any]]:
    for line in segment.read_text(encoding="utf-8", errors="replace").splitlines():
        checksum, _, content = line.partition(" ")
        if checksum == f"{zlib.crc32(content.encode()):08x}":
            key, value = json.loads(content)
            yield key, value


def _refused(folder: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"{folder}: cannot store responses ({reason}). Free space, or name another folder with --out.")


Compute = Callable[[Any], list[Any]]
"""Computes the responses of a batch, which can be sent to other processes."""

_END = "end"
_NOTHING: tuple[str, list[Any]] = ("", [])  # the argument of a broadcast on other ranks than 0, which is ignored


class Replicas:
    """The replicas of a model, of which this process has one, or a shard of one.

    Args:
        ranks: all processes.
        count: number of replicas.
        index: replica of this process.
        reports: True for one process of each replica.
        compute: functions that compute batches, by kind of batch.
    """

    def __init__(self, ranks: HostGroup, count: int, index: int, reports: bool, compute: Mapping[str, Compute]) -> None:
        self._ranks, self._index, self._reports, self._compute = ranks, index, reports, compute
        self.count = count

    def compute(self, kind: str, batches: Sequence[Any]) -> list[list[Any]]:
        """Compute batches, at most one for each replica; only on rank 0, while the others serve.

        Returns:
            The responses of each batch.
        """
        assert len(batches) <= self.count, "a round has a batch for each replica"
        self._ranks.broadcast((kind, list(batches)))
        return self._round(kind, batches)

    def serve(self) -> None:
        """Compute the batches that rank 0 sends, until it calls ``end``; on all other ranks."""
        while True:
            kind, batches = self._ranks.broadcast(_NOTHING)
            if kind == _END:
                return
            self._round(kind, batches)

    def end(self) -> None:
        """End ``serve`` on the other ranks."""
        self._ranks.broadcast((_END, []))

    def _round(self, kind: str, batches: Sequence[Any]) -> list[list[Any]]:
        own = batches[self._index] if self._index < len(batches) else None
        result = self._ranks.run_on_all(lambda: [] if own is None else self._compute[kind](own))
        gathered = self._ranks.gather((self._index, result) if self._reports else None) or []
        by_replica = dict(each for each in gathered if each is not None)
        return [by_replica[index] for index in range(len(batches))] if by_replica else []


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


T = TypeVar("T")

_NUMERICS = 3  # to be increased when responses of the same weights change, so that stored ones are not used


@dataclass(frozen=True)
class ServingOptions:
    """Options of the evaluation of a model.

    Attributes:
        weights: ``model``, or ``ema`` for the average of the weights.
        dtype: dtype of weights and activations; None for that of the stored weights.
        tensor: tensor-parallel degree; the other processes are data-parallel replicas.
        batches: limits of batches of continuations to score.
        generation: limits of batches of texts to generate.
    """

    weights: str = "model"
    dtype: torch.dtype | None = None
    tensor: int = 1
    batches: BatchLimits = field(default_factory=BatchLimits)
    generation: GenerationLimits = field(default_factory=GenerationLimits)


@dataclass(frozen=True)
class ServedModel:
    """A model that answers requests, on rank 0.

    Attributes:
        path: folder of the model.
        config: the complete model.
        sha256: identity of its weights.
        dtype: dtype of weights and activations.
        replicas: number of data-parallel replicas.
        tensor: tensor-parallel degree.
        tokenizer: its tokenizer.
        end_ids: tokens that end a text.
        responder: answers requests.
        scoring, generation: the kinds of requests.
    """

    path: Path
    config: ModelConfig
    sha256: str
    dtype: torch.dtype
    replicas: int
    tensor: int
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    responder: Responder
    scoring: Scoring
    generation: Generation


def serve_model(
    path: str | Path,
    options: ServingOptions,
    runtime: Runtime,
    cache_folder: Path,
    progress: Progress,
    work: Callable[[ServedModel], T],
) -> T | None:
    """Load a model in all processes, and do some work with it on rank 0. Collective.

    Args:
        path: see ``open_model``.
        options: how it is evaluated.
        runtime: this process.
        cache_folder: folder of stored responses of all models.
        progress: called after each round of batches, on rank 0.
        work: called on rank 0.

    Returns:
        What ``work`` returns on rank 0; None on other ranks.

    Raises:
        CheckpointError: there is no valid checkpoint, or files are missing or damaged.
        LaunchError: the model cannot be divided over the processes.
        StorageError: responses cannot be stored.
    """
    source, sha256 = _open(path, options, runtime)
    dtype = options.dtype or source.dtype
    model, layout = runtime.ranks.run_on_all(lambda: build_forward_model(source.config, runtime, options.tensor, dtype))
    runtime.ranks.run_on_all(lambda: source.fill(model.local_parameters))
    prepare_to_generate(model.decoder)
    tokenizer = runtime.ranks.run_on_all(source.tokenizer)
    here = layout.coordinates(runtime.rank)
    scorer, generator = Scorer(model), BatchGenerator(model, source.end_ids, tokenizer.decode)
    scoring, generation = Scoring(options.batches), Generation(options.generation)
    compute: dict[str, Compute] = {scoring.name: scorer.score, generation.name: generator.generate}
    replicas = Replicas(runtime.ranks, layout.data, here.dp, here.tp == 0, compute)
    if not runtime.ranks.is_first:
        replicas.serve()
        return None
    identity = hashlib.sha256(f"{sha256} {dtype} {tokenizer.sha256} {_NUMERICS}".encode()).hexdigest()
    try:
        with ResponseCache(cache_folder, identity) as cache:
            responder = Responder(replicas, cache, progress)
            return work(
                ServedModel(
                    source.path,
                    source.config,
                    sha256,
                    dtype,
                    layout.data,
                    layout.tensor,
                    tokenizer,
                    source.end_ids,
                    responder,
                    scoring,
                    generation,
                )
            )
    finally:
        replicas.end()


def _open(path: str | Path, options: ServingOptions, runtime: Runtime) -> tuple[ModelSource, str]:
    """Find, verify and identify the model on rank 0, and open the same on all ranks."""
    first: list[ModelSource] = []

    def find() -> tuple[str, str]:
        first.append(open_model(path, options.weights))
        return str(first[0].path), first[0].sha256()

    folder, sha256 = runtime.ranks.run_on_rank0(find)
    source = runtime.ranks.run_on_all(lambda: first[0] if first else open_model(folder, options.weights, verify=False))
    return source, sha256
