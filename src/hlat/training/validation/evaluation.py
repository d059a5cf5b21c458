"""Evaluation of a run's weights while training: the validation split, further validation sets, tasks, and prompts.

    recipe, prepared data --open_evaluation--> Evaluation --run--> EvaluationResult --columns--> metrics.jsonl:

    val_loss, val_bits_per_byte          the validation split of the run's data
    val/sources/NAME/loss, ...           each source of it, if there are 2 to 32
    val/NAME/loss, .../bits_per_byte     a set of evaluation.sets
    task/NAME/acc, acc_norm, ...         a task of evaluation.tasks

and EvaluationResult.samples --> samples.jsonl: the prompts of evaluation.prompts, continued.

All of it is forward only, and the same in any parallel layout. An evaluation that ends a run's processes is tried
twice, and not for ever; otherwise it would end every attempt at the same step:

    begin(step) -> evaluation -> done(step)         evaluation.json counts the attempts in between
    process killed, out of memory, hanging -> the next attempt of the run evaluates the step again, the third does not
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hlat.checkpoint import RecipeChange
from hlat.config import Recipe
from hlat.data import PreparedData, ValidationData, check_vocabulary
from hlat.runtime.storage.local_files import write_atomic
from hlat.training.validation.losses import LossEvaluator, ValidationResult, validate
from hlat.training.validation.tasks import (
    PromptSet,
    TaskRequest,
    TaskScore,
    TokenRow,
    encode_prompts,
    encode_requests,
    read_requests,
    score_requests,
    task_scores,
)


@dataclass(frozen=True)
class EvaluationResult:
    """Results of an evaluation, the same on every rank."""

    validation: ValidationResult | None  # of the validation split; None if the data has none
    sets: dict[str, ValidationResult] = field(default_factory=dict)  # by name
    tasks: dict[str, TaskScore] = field(default_factory=dict)  # by name
    samples: tuple[tuple[str, str], ...] = ()  # each of ``evaluation.prompts``, with its continuation

    def columns(self) -> dict[str, Any]:
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
    """Return a source's name as part of a column's name: a source without a name has its path."""
    return source.replace("/", "_")


@dataclass(frozen=True)
class Evaluation:
    """Everything that the weights of a run are evaluated on."""

    validation: ValidationData | None  # the validation split; None if the data has none
    sets: Mapping[str, ValidationData]  # further validation sets, by name
    fingerprints: Mapping[str, str]  # of the content of the sets
    requests: Sequence[TaskRequest]
    rows: Sequence[TokenRow]
    prompts: PromptSet
    length: int  # tokens of the longest rows
    batch_size: int  # sequences in a micro-batch

    @cached_property  # every checkpoint has it
    def identity(self) -> dict[str, str]:
        """Hashes of the content of sets and requests, by name: the same on every rank."""
        asked = repr([(request, tuple(row)) for request, row in zip(self.requests, self.rows, strict=True)])
        rows = hashlib.sha256(asked.encode()).hexdigest()
        return {**self.fingerprints, **({"requests of evaluation.tasks": rows} if self.rows else {})}

    def changes_since(self, saved: Mapping[str, str]) -> list[RecipeChange]:
        """Return what has other content than an ``identity`` that was saved with a checkpoint."""
        return [
            RecipeChange(f"content of {name} (do not compare its scores with earlier ones)", old[:8], now[:8])
            for name, now in self.identity.items()
            if (old := saved.get(name, now)) != now
        ]

    def __bool__(self) -> bool:
        return self.validation is not None or bool(self.sets or self.requests or self.prompts.texts)

    def run(self, model: LossEvaluator, progress: Callable[[str, int, int], None] | None = None) -> EvaluationResult:
        """Evaluate a model. Collective; every rank has the same result.

        ``progress`` is called with the name of a set, and how many of its micro-batches are done, of how many.
        """

        def loss(data: ValidationData, name: str) -> ValidationResult:
            return validate(model, data, self.batch_size, None if progress is None else partial(progress, name))

        validation = None if self.validation is None else loss(self.validation, "validation")
        sets = {name: loss(data, f"validation of {name}") for name, data in self.sets.items()}
        likelihoods = score_requests(model, self.rows, self.length, self.batch_size)
        samples = self.prompts.continue_all(model, self.length, self.batch_size)
        return EvaluationResult(validation, sets, task_scores(self.requests, likelihoods), samples)


def open_evaluation(recipe: Recipe, prepared: PreparedData, sets: Mapping[str, PreparedData]) -> Evaluation:
    """Open everything that a run is evaluated on; ``sets`` are the prepared data of ``evaluation.sets``, by name.

    Raises:
        DataError: a set, a file of requests or a prompt cannot be used.
    """
    settings, length, isolate = recipe.evaluation, recipe.data.sequence_length, recipe.data.isolate
    validation = None
    if prepared.validation_tokens > 1:  # of one token nothing is predicted
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


_TRIES = 2
"""Number of times that the evaluation of a step is begun."""
_MOST_FAILURES = 2
"""Number of steps in a row without an evaluation after which a run evaluates no more."""


class EvaluationAttempts:
    """Evaluations that began and did not end, by step, in the file ``evaluation.json`` of a run's folder.

    A disk that refuses the file does not stop the run: the file then protects from nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "evaluation.json"
        self._unfinished: dict[int, int] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):  # a damaged file protects from nothing
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self._unfinished = {int(step): int(count) for step, count in content["unfinished"].items()}

    def refusal(self, step: int) -> str:
        """Explain why this step is not evaluated; empty if it is."""
        failed = [str(each) for each, count in self._unfinished.items() if count >= _TRIES]
        if len(failed) >= _MOST_FAILURES:
            return (
                f"no evaluation: those of steps {' and '.join(failed)} ended the run's processes. Use hlat evaluate on "
                f"checkpoints, or delete {self._file} to try again."
            )
        if str(step) in failed:
            return f"no evaluation of step {step}: it ended the run's processes. Use hlat evaluate on a checkpoint."
        return ""

    def begin(self, step: int) -> None:
        self._unfinished[step] = self._unfinished.get(step, 0) + 1
        self._write()

    def done(self, step: int) -> None:
        # Failures of earlier steps are forgotten: only failures in a row end the evaluations of a run.
        self._unfinished = {each: count for each, count in self._unfinished.items() if each > step}
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            if self._unfinished:
                write_atomic(self._file, json.dumps({"unfinished": self._unfinished}).encode())
            else:
                self._file.unlink(missing_ok=True)
