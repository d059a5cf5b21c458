"""Evaluation of a run's checkpoints in a process of its own, while the run goes on.

    run folder --each new checkpoint--> model --Evaluation.run--> a line of evaluations.jsonl

The run's recipe says what is evaluated: its validation split, ``evaluation.sets`` and ``evaluation.tasks``. A run that
leaves evaluation to this process has ``evaluation.every_steps: null``.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hlat.checkpoint import (
    check_same_tokenizer,
    find_checkpoints_folder,
    list_checkpoints,
    load_model,
    saved_precision_mode,
)
from hlat.config import Recipe
from hlat.data import PreparedData, check_vocabulary, open_prepared, open_validation_sets, prepare_validation_sets
from hlat.evaluation.perplexity import run_data, saved_recipe
from hlat.precision import MODES
from hlat.runtime.distributed.join import join_run
from hlat.runtime.errors import CheckpointError
from hlat.tracking import EventLog, append_samples, read_events, read_valid_records
from hlat.training import (
    Evaluation,
    EvaluationResult,
    SingleProcessModel,
    encode_requests,
    open_evaluation,
    read_requests,
)

RESULTS = "evaluations.jsonl"
"""Name of the file of results in a run's folder."""

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """Results of a checkpoint.

    Attributes:
        step: optimizer steps done.
        tokens: training tokens consumed.
        result: the results.
    """

    step: int
    tokens: int
    result: EvaluationResult


def watch_run(
    run: str | Path,
    tasks: Sequence[str | Path] = (),
    *,
    weights: str = "model",
    once: bool = False,
    skipped: Callable[[str], None] = lambda message: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[EvaluatedCheckpoint]:
    """Evaluate each checkpoint of a run that has no line in ``evaluations.jsonl`` yet, oldest first.

    Args:
        run: folder of the run; its first checkpoint is waited for, unless ``once``.
        tasks: further files of requests.
        weights: ``model``, or ``ema`` for their average.
        once: end after the checkpoints that exist, instead of with the run.
        skipped: called with a message for a checkpoint that was removed or damaged before it was loaded.
        sleep: waits so many seconds.

    Yields:
        Results of each checkpoint, after they are written.

    Raises:
        CheckpointError: the folder is no run, or ``once``, and it has no checkpoint.
        DataError: data, a set or a file of requests cannot be used.
        StorageError: results cannot be written.
    """
    folder = Path(run)
    if once or not folder.is_dir():
        find_checkpoints_folder(folder)
    tried = _evaluated(folder, weights)
    while True:
        ended = once or _has_ended(folder)
        for path in _committed(folder):
            if path.name in tried:
                continue
            tried.add(path.name)
            try:
                found = _evaluate(folder, path, tasks, weights)
            except CheckpointError as error:
                skipped(f"{path.name} is skipped: {error}")
                continue
            _append(folder, path.name, weights, found)
            yield found
        if ended:
            return
        sleep(_POLL_SECONDS)


def _committed(folder: Path) -> list[Path]:
    checkpoints = folder / "checkpoints"
    entries = list_checkpoints(checkpoints) if checkpoints.is_dir() else []
    return [Path(entry.location) for entry in entries if entry.state == "committed"]


def _evaluated(folder: Path, weights: str) -> set[str]:
    """Return the names of the checkpoints with results."""
    file = folder / RESULTS
    lines = read_events(file) if file.is_file() else []
    return {line["checkpoint"] for line in lines if line["weights"] == weights}


def _has_ended(folder: Path) -> bool:
    """True if all steps of the run are done."""
    events, _ = read_valid_records(folder / "events.jsonl")
    ends = [event for event in events if event.get("event") in ("start", "resume", "end")]
    return bool(ends) and ends[-1]["event"] == "end" and ends[-1]["reason"] == "finished"


def _append(folder: Path, name: str, weights: str, found: EvaluatedCheckpoint) -> None:
    log = EventLog(folder / RESULTS)
    try:
        about = {"checkpoint": name, "weights": weights, "step": found.step, "tokens": found.tokens}
        log.append("evaluation", **about, **found.result.columns())
    finally:
        log.close()
    append_samples(folder, found.step, found.result.samples)


@torch.no_grad()
def _evaluate(folder: Path, path: Path, tasks: Sequence[str | Path], weights: str) -> EvaluatedCheckpoint:
    model, meta = load_model(path, join_run().device, torch.float32, weights)
    recipe = saved_recipe(meta, path)
    if recipe is None:
        raise CheckpointError(f"{path}: imported weights are no checkpoint of a run. Use hlat evaluate on them.")
    model.compute = MODES[saved_precision_mode(meta["recipe"])].compute
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": str(folder)})})
    prepared = open_prepared(run_data(recipe, path))
    check_same_tokenizer(path, prepared)
    check_vocabulary(prepared, model.config.vocab_size)
    evaluation = _open(recipe, prepared, tasks)
    return EvaluatedCheckpoint(meta["step"], meta["tokens"], evaluation.run(SingleProcessModel(model)))


def _open(recipe: Recipe, prepared: PreparedData, tasks: Sequence[str | Path]) -> Evaluation:
    """Open what a run is evaluated on, and further files of requests."""
    prepare_validation_sets(recipe, prepared)
    evaluation = open_evaluation(recipe, prepared, open_validation_sets(recipe))
    more = read_requests(tasks)
    rows = encode_requests(more, prepared.tokenizer, evaluation.length)
    return replace(evaluation, requests=[*evaluation.requests, *more], rows=[*evaluation.rows, *rows])
