"""Scores of evaluation tasks: log-likelihoods of rendered requests in any parallel layout, forward only.

TokenRows --sorted by length, equal batches for every data-parallel rank--> losses of rows, summed over ranks
    --> TaskScore by task: accuracy, length-normalised accuracy, bits per byte of the gold answers
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hlat.training.validation.batching import split_batches
from hlat.training.validation.losses import LossEvaluator
from hlat.training.validation.requests import TaskRequest, TokenRow
from hlat.training.validation.rows import pad_rows, row_lengths


@dataclass(frozen=True)
class TaskScore:
    """Scores of a task.

    Attributes:
        examples: number of examples.
        accuracy: share of the examples whose most likely choice is right; None if it has gold answers only.
        normalized_accuracy: the same with log-likelihoods per character.
        bits_per_byte: bits per UTF-8 byte of the gold answers: mean over the examples.
    """

    examples: int
    accuracy: float | None
    normalized_accuracy: float | None
    bits_per_byte: float

    def columns(self, task: str) -> dict[str, float]:
        """Return the columns of metrics.jsonl."""
        named = {"acc": self.accuracy, "acc_norm": self.normalized_accuracy, "bits_per_byte": self.bits_per_byte}
        return {f"task/{task}/{name}": value for name, value in named.items() if value is not None}


def score_requests(model: LossEvaluator, rows: Sequence[TokenRow], longest: int, batch_size: int) -> list[float]:
    """Return the log-likelihood of each row's continuation in nats, the same on every rank. Collective.

    Args:
        model: model to evaluate.
        rows: tokens of the requests.
        longest: length of the longest rows, S.
        batch_size: rows of that length in a batch; a batch of shorter rows has more, up to as many tokens.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    lengths = row_lengths(longest, model.row_multiple)
    for index, row in enumerate(rows):
        by_length[next(length for length in lengths if length >= len(row.tokens) - 1)].append(index)
    nats = model.evaluate_rows([]).new_zeros(len(rows))
    for length, members in sorted(by_length.items(), reverse=True):  # most memory first
        size = batch_size * longest // length
        mine = split_batches(members, size, model.data_ranks, model.data_index)
        batches = [pad_rows([rows[index] for index in batch], size, length, model.isolates) for batch in mine]
        losses = model.evaluate_rows(batches)
        for number, batch in enumerate(mine):
            nats[batch] = losses[number * size : number * size + len(batch)]
    return [-value for value in model.sum_over_world(nats).tolist()]


def task_scores(requests: Sequence[TaskRequest], likelihoods: Sequence[float]) -> dict[str, TaskScore]:
    """Compute the scores of each task from the log-likelihoods of its requests, in nats."""
    examples: dict[str, dict[int, list[tuple[TaskRequest, float]]]] = defaultdict(lambda: defaultdict(list))
    for request, likelihood in zip(requests, likelihoods, strict=True):
        examples[request.task][request.group].append((request, likelihood))
    return {task: _score(list(groups.values())) for task, groups in examples.items()}


def _score(examples: Sequence[Sequence[tuple[TaskRequest, float]]]) -> TaskScore:
    count = len(examples)
    bits = [_gold_bits_per_byte(choices) for choices in examples]
    if all(request.is_gold for choices in examples for request, _ in choices):
        return TaskScore(count, None, None, sum(bits) / count)
    plain = sum(_is_right(choices, [value for _, value in choices]) for choices in examples)
    per_character = [[value / request.normalization for request, value in choices] for choices in examples]
    normalized = sum(_is_right(choices, values) for choices, values in zip(examples, per_character, strict=True))
    return TaskScore(count, plain / count, normalized / count, sum(bits) / count)


def _is_right(choices: Sequence[tuple[TaskRequest, float]], scores: Sequence[float]) -> bool:
    """Return True if the first choice with the highest score is gold."""
    best = max(range(len(scores)), key=lambda index: scores[index])
    return choices[best][0].is_gold


def _gold_bits_per_byte(choices: Sequence[tuple[TaskRequest, float]]) -> float:
    """Return the bits per byte of the gold answer, the most likely one if there are several."""
    return min(
        -value / (math.log(2) * len(request.continuation.encode())) for request, value in choices if request.is_gold
    )
