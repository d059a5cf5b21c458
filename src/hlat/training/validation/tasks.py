"""Scores of evaluation tasks: log-likelihoods of rendered requests in any parallel layout, forward only.

    TokenRows --sorted by length, equal batches for every data-parallel rank--> losses of rows, summed over ranks
        --> TaskScore by task: accuracy, length-normalised accuracy, bits per byte of the gold answers

Rows are padded to one of a few lengths, so that short requests cost less than complete sequences. Padding comes last,
where causal attention does not look at it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hlat.model import IGNORED
from hlat.parallel import MicroBatch
from hlat.training.validation.losses import LossEvaluator
from hlat.training.validation.requests import TaskRequest, TokenRow

_SHORTEST_ROW = 128  # tokens: shorter rows are not faster


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
        mine = _batches(members, size, model.data_ranks, model.data_index)
        batches = [_micro_batch([rows[index] for index in batch], size, length, model.isolates) for batch in mine]
        losses = model.evaluate_rows(batches)
        for number, batch in enumerate(mine):
            nats[batch] = losses[number * size : number * size + len(batch)]
    return [-value for value in model.sum_over_world(nats).tolist()]


def row_lengths(longest: int, multiple: int) -> list[int]:
    """Return the lengths that rows are padded to, ascending: halves of the longest that are multiples of a number."""
    lengths = [longest]
    while lengths[-1] // 2 >= _SHORTEST_ROW and lengths[-1] % (2 * multiple) == 0:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def _batches(members: Sequence[int], size: int, ranks: int, rank: int) -> list[list[int]]:
    """Split rows into batches, and return those of a data-parallel rank; every rank has the same number of them."""
    rounds = -(-len(members) // (size * ranks))
    starts = [(number * ranks + rank) * size for number in range(rounds)]
    return [list(members[start : start + size]) for start in starts]


def _micro_batch(rows: Sequence[TokenRow], size: int, length: int, isolate: bool) -> MicroBatch:
    """Pad rows to a batch of ``size`` rows of ``length`` tokens; only tokens of continuations are labels."""
    inputs_BS = torch.zeros(size, length, dtype=torch.int64)
    labels_BS = torch.full((size, length), IGNORED, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens, last = torch.tensor(row.tokens), len(row.tokens) - 1
        inputs_BS[index, :last] = tokens[:-1]
        labels_BS[index, last - row.asked : last] = tokens[-row.asked :]
    positions_BS = torch.arange(length).expand(size, -1).contiguous() if isolate else None
    return MicroBatch(inputs_BS, labels_BS, positions_BS)


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
