"""A model in all processes of a run, that rank 0 asks and the others serve.

folder -> this rank's shard of the model --> rank 0: the work, with a responder    other ranks: serve until it is done
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from hlat.checkpoint import ModelSource, open_model
from hlat.config import ModelConfig
from hlat.data import Tokenizer
from hlat.evaluation.batch_generation.generator import BatchGenerator
from hlat.evaluation.batch_generation.requests import GenerationLimits
from hlat.evaluation.fast_decoding import prepare_to_generate
from hlat.evaluation.responses.kinds import Generation, Scoring
from hlat.evaluation.responses.replicas import Compute, Replicas
from hlat.evaluation.responses.responder import Progress, Responder
from hlat.evaluation.responses.response_cache import ResponseCache
from hlat.evaluation.scoring.batches import BatchLimits
from hlat.evaluation.scoring.scorer import Scorer
from hlat.parallel import build_forward_model
from hlat.runtime.distributed.join import Runtime

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
