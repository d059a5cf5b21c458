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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TextIO, TypeVar

import torch

from hlat.checkpoint import ModelSource, open_model
from hlat.config import ModelConfig
from hlat.data import Tokenizer
from hlat.evaluation.generation import (
    BatchGenerator,
    GenerationBatch,
    GenerationLimits,
    GenerationRequest,
    plan_generation,
)
from hlat.evaluation.next_token import prepare_to_generate
from hlat.evaluation.scoring import BatchLimits, Score, Scorer, ScoreRequest, ScoringBatch, plan_batches
from hlat.parallel import build_forward_model
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import StorageError

Request = TypeVar("Request", ScoreRequest, GenerationRequest)
Batch = TypeVar("Batch", ScoringBatch, GenerationBatch)
Response = TypeVar("Response")


@dataclass(frozen=True)
class RequestKind(Generic[Request, Batch, Response]):
    """One kind of requests: how they become batches, and their responses JSON."""

    name: str  # by which replicas know the kind
    title: str  # of its requests in progress messages
    plan: Callable[[Sequence[Request]], list[Batch]]  # divides requests into batches
    to_json: Callable[[Response], Any]  # encodes a response
    from_json: Callable[[Any], Response]  # returns the response that ``to_json`` has encoded


Scoring = RequestKind[ScoreRequest, ScoringBatch, Score]
Generation = RequestKind[GenerationRequest, GenerationBatch, list[int]]


def scoring_within(limits: BatchLimits) -> Scoring:
    """Requests to score continuations, in batches within limits."""
    plan = partial(plan_batches, limits=limits)
    return Scoring("score", "continuations scored", plan, lambda score: list(astuple(score)), lambda it: Score(*it))


def generation_within(limits: GenerationLimits) -> Generation:
    """Requests to continue texts, in batches within limits."""
    return Generation("generate", "texts generated", partial(plan_generation, limits=limits), list, list)


_SUFFIX = ".jsonl"


class ResponseCache:
    """Responses of one model by key, in memory and on disk; a context that opens and closes the files.

    ``folder`` has those of all models; ``model`` is a hash of the weights and of what else changes responses.
    """

    def __init__(self, folder: Path, model: str) -> None:
        # 128 bits of the hash are enough to tell models apart.
        self.folder = folder / model[:32]
        self._responses: dict[str, Any] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> "ResponseCache":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for segment in sorted(self.folder.glob(f"*{_SUFFIX}")):
                self._responses |= dict(_valid_lines(segment))
            # A segment of its own, so that evaluations may share a folder.
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
            # An evaluation that found all its responses leaves no file behind.
            if empty:
                name.unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        return key in self._responses

    def __getitem__(self, key: str) -> Any:
        return self._responses[key]

    def add(self, responses: Mapping[str, Any]) -> None:
        """Store JSON values by key; they survive the end of the process. Raises StorageError if the disk refuses."""
        assert self._file is not None, "used as a context"
        lines = [_line(key, value) for key, value in responses.items()]
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise _refused(self.folder, error) from error
        self._responses |= responses


def response_key(request: ScoreRequest | GenerationRequest) -> str:
    """Return a hash of all that decides about the response of a given model."""
    text = json.dumps([type(request).__name__, asdict(request)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _line(key: str, value: Any) -> str:
    content = json.dumps([key, value], separators=(",", ":"))
    return f"{zlib.crc32(content.encode()):08x} {content}\n"


def _valid_lines(segment: Path) -> Iterable[tuple[str, Any]]:
    for line in segment.read_text(encoding="utf-8", errors="replace").splitlines():
        checksum, _, content = line.partition(" ")
        # A line that was being written when its process was killed is ignored.
        if checksum == f"{zlib.crc32(content.encode()):08x}":
            key, value = json.loads(content)
            yield key, value


def _refused(folder: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"{folder}: cannot store responses ({reason}). Free space, or name another folder with --to.")


Compute = Callable[[Any], list[Any]]
"""Computes the responses of a batch, which can be sent to other processes."""

_END = "end"
_NOTHING: tuple[str, list[Any]] = ("", [])  # the argument of a broadcast on other ranks than 0, which is ignored


class Replicas:
    """Replicas of a model, of which this process has one, or a shard of one; ``reports`` is True once per replica."""

    def __init__(self, ranks: HostGroup, count: int, index: int, reports: bool, compute: Mapping[str, Compute]) -> None:
        self._ranks, self._index, self._reports, self._compute = ranks, index, reports, compute
        self.count = count

    def compute(self, kind: str, batches: Sequence[Any]) -> list[list[Any]]:
        """Compute at most one batch for each replica, and return the responses; on rank 0, while the others serve."""
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
        self._ranks.broadcast((_END, []))

    def _round(self, kind: str, batches: Sequence[Any]) -> list[list[Any]]:
        own = batches[self._index] if self._index < len(batches) else None
        # On all: an error of one rank is raised on every one, so that none waits for ever.
        result = self._ranks.run_on_all(lambda: [] if own is None else self._compute[kind](own))
        gathered = self._ranks.gather((self._index, result) if self._reports else None) or []
        by_replica = dict(each for each in gathered if each is not None)
        return [by_replica[index] for index in range(len(batches))] if by_replica else []


Progress = Callable[[str, int, int], None]
"""Called with what is done ("texts generated"), how many are done, and how many there are."""


class Responder:
    """Answers requests on rank 0 from stored responses, or else by the replicas."""

    def __init__(self, replicas: Replicas, cache: ResponseCache, progress: Progress) -> None:
        self._replicas, self._cache, self._progress = replicas, cache, progress
        self.computed = self.looked_up = 0  # distinct requests that were computed, and that had a stored response

    def respond(self, kind: RequestKind[Request, Batch, Response], requests: Sequence[Request]) -> list[Response]:
        keys = [response_key(request) for request in requests]
        # The plan has also requests with a stored response, so that batches are those of an uninterrupted evaluation.
        distinct = dict(zip(keys, requests, strict=True))
        planned = list(distinct)
        stored = {key for key in planned if key in self._cache}
        self.looked_up += len(stored)
        batches = []
        for batch in kind.plan(list(distinct.values())):
            rest = batch.without(lambda index: planned[index] in stored)
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
    """Options of the evaluation of a model, and limits of its batches."""

    weights: str = "model"  # ``model``, or ``ema`` for the average of the weights
    dtype: torch.dtype | None = None  # dtype of weights and activations; None for that of the stored weights
    tensor: int = 1  # tensor-parallel degree; the other processes are data-parallel replicas
    batches: BatchLimits = field(default_factory=BatchLimits)
    generation: GenerationLimits = field(default_factory=GenerationLimits)


@dataclass(frozen=True)
class ServedModel:
    """A model that answers requests, on rank 0."""

    path: Path
    config: ModelConfig
    sha256: str  # of the weights
    dtype: torch.dtype
    tensor: int  # tensor-parallel degree
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # tokens that end a text
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
    """Load a model in all processes, and return what ``work`` does with it on rank 0; None on other ranks. Collective.

    ``cache_folder`` has the stored responses of all models.

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
    scoring, generation = scoring_within(options.batches), generation_within(options.generation)
    compute: dict[str, Compute] = {scoring.name: scorer.score, generation.name: generator.generate}
    replicas = Replicas(runtime.ranks, layout.data, here.dp, here.tp == 0, compute)
    if not runtime.ranks.is_first:
        replicas.serve()
        return None
    # All that changes responses: stored ones of another dtype or tokenizer must not be taken.
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
                    layout.tensor,
                    tokenizer,
                    source.end_ids,
                    responder,
                    scoring,
                    generation,
                )
            )
    finally:
        # Also after an error: the other ranks would wait for ever.
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
