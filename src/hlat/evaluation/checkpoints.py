"""Evaluation of checkpoints: perplexity of one, or of each checkpoint of a run while the run goes on.

    evaluate_checkpoint:  checkpoint -> model, recipe --+
        prepared data -> its tokenizer compared with the checkpoint's -> validation windows
            --> loss, perplexity, bits per byte of every token of the split

    watch_run:  run folder --each new checkpoint--> model --Evaluation.run--> a line of evaluations.jsonl

The run's recipe says what a watched run is evaluated on: its validation split, ``evaluation.sets`` and
``evaluation.tasks``. A run that leaves evaluation to a process of its own has ``evaluation.every_steps: null``.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from hlat.checkpoint import (
    check_same_tokenizer,
    committed_checkpoints,
    find_checkpoints_folder,
    load_model,
    resolve,
    saved_precision_mode,
)
from hlat.config import ModelConfig, Recipe, own_parts
from hlat.data import (
    MANIFEST_FILE,
    PreparedData,
    ValidationData,
    check_vocabulary,
    open_prepared,
    open_validation_sets,
    prepare_validation_sets,
)
from hlat.precision import MODES
from hlat.runtime.distributed.join import join_run
from hlat.runtime.errors import CheckpointError, DataError
from hlat.tracking import EventLog, append_samples, read_events, read_valid_records
from hlat.training import (
    Evaluation,
    EvaluationResult,
    SingleProcessModel,
    ValidationResult,
    encode_requests,
    open_evaluation,
    read_requests,
    validate,
)

# Limits for imported weights, which have no recipe. Longer windows may need too much memory: the logits of 4096 tokens
# over a vocabulary of 128,000 are 2 GB.
_IMPORT_WINDOW = 2048
_IMPORT_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Perplexity:
    """Averages over every token of the split."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    sources: Mapping[str, "Perplexity"] = field(default_factory=dict)  # each source of the split, if there are several
    sets: Mapping[str, "Perplexity"] = field(default_factory=dict)  # each set of evaluation.sets that is prepared

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }
        for name, parts in (("sources", self.sources), ("sets", self.sets)):
            found |= {name: {key: part.to_dict() for key, part in parts.items()}} if parts else {}
        return found

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that overflows a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str | Path | None = None,
    weights: str = "model",
    progress: Callable[[str, int, int], None] | None = None,
) -> Perplexity:
    """Evaluate a checkpoint on the validation split of its run, or of another prepared folder ``data``.

    The split is cut into windows of the run's sequence length. Imported weights, which have no run, are evaluated in
    fp32 on windows of their maximum sequence length, 2048 tokens at most. ``weights`` is ``model``, or ``ema`` for
    their average. ``progress`` is called with what is evaluated, the micro-batches done and their number.

    Raises:
        CheckpointError: the folder has no valid checkpoint.
        DataError: the prepared data is missing or damaged, of another tokenizer, or without a validation split.
    """
    folder = resolve(Path(checkpoint))
    model, meta = load_model(folder, join_run().device, torch.float32, weights)
    recipe = saved_recipe(meta, folder)
    prepared = open_prepared(Path(data) if data is not None else run_data(recipe, folder))
    _check_data(prepared, folder, model.config)
    prepared.check_shards("validation")
    if recipe is not None:
        length, batch = recipe.data.sequence_length, recipe.batch.micro_batch
        model.compute = MODES[saved_precision_mode(meta["recipe"])].compute
    else:
        length = min(model.config.max_sequence_length or _IMPORT_WINDOW, _IMPORT_WINDOW)
        batch = max(1, _IMPORT_BATCH_TOKENS // length)
    isolate, evaluator = recipe is not None and recipe.data.isolate, SingleProcessModel(model)

    def measure(name: str, windows: ValidationData) -> Perplexity:
        report = None if progress is None else partial(progress, name)
        return _perplexity(validate(evaluator, windows, batch, report))

    result = measure("validation split", ValidationData(prepared, length, None, isolate))
    sets = {}
    for name, found in (_prepared_sets(recipe, folder) if data is None else {}).items():
        _check_tokens(found, folder, model.config)
        found.check_shards("train")  # all of a set is in its training split
        sets[name] = measure(name, ValidationData(found, length, None, isolate, split="train"))
    return replace(result, sets=sets)


def _perplexity(result: ValidationResult) -> Perplexity:
    parts = {name: _perplexity(part) for name, part in result.sources.items()}
    return Perplexity(result.loss, result.bits_per_byte, result.tokens, parts)


def _prepared_sets(recipe: Recipe | None, folder: Path) -> dict[str, PreparedData]:
    if recipe is None:
        return {}
    # Sets lie beside the run's own data folder, also if it trains on prepared data from elsewhere.
    place = run_data(recipe.model_copy(update={"data": recipe.data.model_copy(update={"prepared_dir": None})}), folder)
    folders = {name: place.parent / "validation" / name for name in recipe.evaluation.sets}
    return {name: open_prepared(each) for name, each in folders.items() if (each / MANIFEST_FILE).is_file()}


def saved_recipe(meta: Mapping[str, Any], folder: Path) -> Recipe | None:
    """Return the recipe as resolved when the run was saved; None for imported weights."""
    if "recipe" not in meta:
        return None
    try:
        return Recipe.model_validate(meta["recipe"])
    except ValidationError as exc:
        raise CheckpointError(f"{folder}: this version cannot read its recipe: {exc}") from exc


def run_data(recipe: Recipe | None, folder: Path) -> Path:
    """Return the data folder of a checkpoint's run: run/data for run/checkpoints/step-00000040."""
    if recipe is None:
        raise DataError(f"{folder}: imported weights have no data of their own. Name a prepared folder with --data.")
    if recipe.data.prepared_dir is not None:
        return Path(recipe.data.prepared_dir)
    checkpoints = folder.absolute().parent
    if checkpoints.name != "checkpoints":
        raise DataError(
            f"{folder}: is not in the folder of its run, so its data is unknown. Name a prepared folder with --data."
        )
    return checkpoints.parent / "data"


def _check_data(prepared: PreparedData, folder: Path, config: ModelConfig) -> None:
    _check_tokens(prepared, folder, config)
    if not prepared.validation_tokens:
        raise DataError(f"{prepared.dir}: has no validation split. Prepare it with data.validation.fraction above 0.")


def _check_tokens(prepared: PreparedData, folder: Path, config: ModelConfig) -> None:
    check_same_tokenizer(folder, prepared)
    check_vocabulary(prepared, config.vocab_size)


RESULTS = "evaluations.jsonl"
"""Name of the file of results in a run's folder."""

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """Results of one checkpoint of a run."""

    step: int  # optimizer steps done
    tokens: int  # training tokens consumed
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

    Results are yielded after they are written. ``tasks`` are further files of requests. ``once`` ends after the
    checkpoints that exist, instead of with the run. ``skipped`` gets a message for a checkpoint that was removed or
    damaged before it was loaded.

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
        # Before the checkpoints are listed: one that is saved meanwhile must not be missed.
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
            _append_result(folder, path.name, weights, found)
            yield found
        if ended:
            return
        sleep(_POLL_SECONDS)


def _committed(folder: Path) -> list[Path]:
    checkpoints = folder / "checkpoints"
    return committed_checkpoints(checkpoints) if checkpoints.is_dir() else []


def _evaluated(folder: Path, weights: str) -> set[str]:
    file = folder / RESULTS
    lines = read_events(file) if file.is_file() else []
    return {line["checkpoint"] for line in lines if line["weights"] == weights}


def _has_ended(folder: Path) -> bool:
    events, _ = read_valid_records(folder / "events.jsonl")
    ends = [event for event in events if event.get("event") in ("start", "resume", "end")]
    # A run that stopped for another reason may resume, and gets further checkpoints.
    return bool(ends) and ends[-1]["event"] == "end" and ends[-1]["reason"] == "finished"


def _append_result(folder: Path, name: str, weights: str, found: EvaluatedCheckpoint) -> None:
    with closing(EventLog(folder / RESULTS)) as log:
        about = {"checkpoint": name, "weights": weights, "step": found.step, "tokens": found.tokens}
        log.append("evaluation", **about, **found.result.columns())
    append_samples(folder, found.step, found.result.samples)


@torch.no_grad()
def _evaluate(folder: Path, path: Path, tasks: Sequence[str | Path], weights: str) -> EvaluatedCheckpoint:
    model, meta = load_model(path, join_run().device, torch.float32, weights)
    recipe = saved_recipe(meta, path)
    if recipe is None:
        raise CheckpointError(f"{path}: imported weights are no checkpoint of a run. Use hlat evaluate on them.")
    model.compute = MODES[saved_precision_mode(meta["recipe"])].compute
    # The folder may have been moved or copied since the run.
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": str(folder)})})
    prepared = open_prepared(run_data(recipe, path))
    _check_tokens(prepared, path, model.config)
    evaluation = _open_evaluation(recipe, prepared, tasks)
    return EvaluatedCheckpoint(meta["step"], meta["tokens"], evaluation.run(SingleProcessModel(model)))


def _open_evaluation(recipe: Recipe, prepared: PreparedData, tasks: Sequence[str | Path]) -> Evaluation:
    # A checkpoint comes from anywhere: functions that it names are not called.
    files = tuple(task for task in recipe.evaluation.tasks if not own_parts.TASKS.has(task))
    recipe = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"tasks": files})})
    prepare_validation_sets(recipe, prepared)
    evaluation = open_evaluation(recipe, prepared, open_validation_sets(recipe))
    more = read_requests(tasks)
    rows = encode_requests(more, prepared.tokenizer, evaluation.length)
    return replace(evaluation, requests=[*evaluation.requests, *more], rows=[*evaluation.rows, *rows])
