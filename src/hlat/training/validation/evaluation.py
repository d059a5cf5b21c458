"""Evaluation of a run's weights: the validation split, further validation sets, and tasks.

    recipe, prepared data --open_evaluation--> Evaluation --run--> EvaluationResult --columns--> metrics.jsonl:

    val_loss, val_bits_per_byte          the validation split of the run's data
    val/sources/NAME/loss, ...           each source of it, if there are 2 to 32
    val/NAME/loss, .../bits_per_byte     a set of evaluation.sets
    task/NAME/acc, acc_norm, ...         a task of evaluation.tasks

and EvaluationResult.samples --> samples.jsonl: the prompts of evaluation.prompts, continued.

All of it is forward only, and the same in any parallel layout.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hlat.checkpoint import RecipeChange
from hlat.config import Recipe
from hlat.data import PreparedData, ValidationData, check_vocabulary
from hlat.training.validation.losses import LossEvaluator, ValidationResult, validate
from hlat.training.validation.requests import TaskRequest, TokenRow, encode_requests, read_requests
from hlat.training.validation.samples import PromptSet, encode_prompts
from hlat.training.validation.tasks import TaskScore, score_requests, task_scores


@dataclass(frozen=True)
class EvaluationResult:
    """Results of an evaluation.

    Attributes:
        validation: averages over the validation split; None if the data has none.
        sets: the same for each set of ``evaluation.sets``, by name.
        tasks: scores of each task of ``evaluation.tasks``, by name.
        samples: each of ``evaluation.prompts``, with its continuation.
    """

    validation: ValidationResult | None
    sets: dict[str, ValidationResult] = field(default_factory=dict)
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    samples: tuple[tuple[str, str], ...] = ()

    def columns(self) -> dict[str, Any]:
        """Return the columns of metrics.jsonl."""
        found: dict[str, Any] = {}
        if self.validation is not None:
            found |= {"val_loss": self.validation.loss, "val_bits_per_byte": self.validation.bits_per_byte}
            for name, result in self.validation.sources.items():
                key = f"val/sources/{column_name(name)}"
                found |= {f"{key}/loss": result.loss, f"{key}/bits_per_byte": result.bits_per_byte}
        for name, result in self.sets.items():
            found |= {f"val/{name}/loss": result.loss, f"val/{name}/bits_per_byte": result.bits_per_byte}
        for name, score in self.tasks.items():
            found |= score.columns(name)
        return found


def column_name(source: str) -> str:
    """Return the name of a source as a part of a column's: a source without a name has its path."""
    return source.replace("/", "_")


@dataclass(frozen=True)
class Evaluation:
    """Everything that the weights of a run are evaluated on.

    Attributes:
        validation: the validation split; None if the data has none.
        sets: further validation sets, by name.
        fingerprints: hashes of their content.
        requests: requests of tasks.
        rows: their tokens.
        prompts: texts to continue.
        length: tokens of the longest rows.
        batch_size: sequences in a micro-batch.
    """

    validation: ValidationData | None
    sets: Mapping[str, ValidationData]
    fingerprints: Mapping[str, str]
    requests: Sequence[TaskRequest]
    rows: Sequence[TokenRow]
    prompts: PromptSet
    length: int
    batch_size: int

    @cached_property  # every checkpoint has it
    def identity(self) -> dict[str, str]:
        """Hashes of the content of sets and requests, by name: the same on every rank."""
        asked = repr([(request, tuple(row)) for request, row in zip(self.requests, self.rows, strict=True)])
        rows = hashlib.sha256(asked.encode()).hexdigest()
        return {**self.fingerprints, **({"requests of evaluation.tasks": rows} if self.rows else {})}

    def changes_since(self, saved: Mapping[str, str]) -> list[RecipeChange]:
        """Return what has another content than in an ``identity`` that was saved with a checkpoint."""
        return [
            RecipeChange(f"content of {name} (do not compare its scores with earlier ones)", old[:8], now[:8])
            for name, now in self.identity.items()
            if (old := saved.get(name, now)) != now
        ]

    def __bool__(self) -> bool:
        """True if there is anything to evaluate on."""
        return self.validation is not None or bool(self.sets or self.requests or self.prompts.texts)

    def run(self, model: LossEvaluator) -> EvaluationResult:
        """Evaluate a model. Collective; every rank has the same result."""
        validation = None if self.validation is None else validate(model, self.validation, self.batch_size)
        sets = {name: validate(model, data, self.batch_size) for name, data in self.sets.items()}
        likelihoods = score_requests(model, self.rows, self.length, self.batch_size)
        samples = self.prompts.continue_all(model, self.length, self.batch_size)
        return EvaluationResult(validation, sets, task_scores(self.requests, likelihoods), samples)


def open_evaluation(recipe: Recipe, prepared: PreparedData, sets: Mapping[str, PreparedData]) -> Evaluation:
    """Open everything that a run is evaluated on.

    Args:
        recipe: recipe of the run.
        prepared: its data.
        sets: prepared data of ``evaluation.sets``, by name.

    Raises:
        DataError: a set, a file of requests or a prompt cannot be used.
    """
    settings, length, isolate = recipe.evaluation, recipe.data.sequence_length, recipe.data.isolate
    validation = None
    if prepared.validation_tokens:
        validation = ValidationData(prepared, length, settings.sequences, isolate)
    opened = {}
    for name, data in sets.items():
        check_vocabulary(data, recipe.model.vocab_size)
        opened[name] = ValidationData(data, length, settings.sequences, isolate, split="train")
    requests = read_requests(settings.tasks)
    rows = encode_requests(requests, prepared.tokenizer, length)
    fingerprints = {f"validation set {name}": data.fingerprint for name, data in sets.items()}
    prompts = encode_prompts(settings.prompts, prepared.tokenizer, settings.sample_tokens, length)
    return Evaluation(validation, opened, fingerprints, requests, rows, prompts, length, recipe.batch.micro_batch)
