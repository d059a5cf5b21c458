"""Perplexity of a checkpoint over a complete validation split.

checkpoint -> model, recipe --+
prepared data -> its tokenizer compared with the checkpoint's -> validation windows --> loss, perplexity, bits per byte
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from hlat.checkpoint import check_same_tokenizer, load_model, resolve, saved_precision_mode
from hlat.config import ModelConfig, Recipe
from hlat.data import MANIFEST_FILE, PreparedData, ValidationData, check_vocabulary, open_prepared
from hlat.precision import MODES
from hlat.runtime.distributed.join import join_run
from hlat.runtime.errors import CheckpointError, DataError
from hlat.training import SingleProcessModel, ValidationResult, validate

# For imported weights, which have no recipe. Longer windows may need too much memory: the logits of 4096 tokens over a
# vocabulary of 128,000 are 2 GB.
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
        """Return everything as JSON values."""
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
    """Evaluate a checkpoint on the validation split of its run, or of another prepared folder.

    The split is cut into windows of the run's sequence length. Imported weights, which have no run, are evaluated in
    fp32 on windows of their maximum sequence length, 2048 tokens at most.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        data: prepared data; None takes data.prepared_dir of the run's recipe, or the folder ``data`` next to the
            checkpoints folder.
        weights: ``model``, or ``ema`` for their average.
        progress: called with what is evaluated, the micro-batches done and their number.

    Raises:
        CheckpointError: the folder has no valid checkpoint.
        DataError: there is no prepared data, or it was made with another tokenizer, or has no validation split, or a
            shard of it is damaged.
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
    """Open the sets of ``evaluation.sets`` that the run of a checkpoint has prepared."""
    if recipe is None:
        return {}
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
