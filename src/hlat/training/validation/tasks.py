"""Evaluation tasks and prompts while training: rows of tokens, scored or continued in any layout, forward only.

    FILE.jsonl --read_requests--> TaskRequest --encode_requests--> TokenRow: input tokens, and how many are asked for
    rows --row_lengths--> groups of one padded length --split_batches--> this rank's batches --pad_rows--> MicroBatch
    TokenRows --score_requests--> losses of rows, summed over ranks
        --task_scores--> TaskScore by task: accuracy, length-normalised accuracy, bits per byte of the gold answers
    prompts --continue_rows: the most likely token, one forward pass each--> tokens --> texts --> samples.jsonl

Requests are rendered before training: continuations whose likelihood is asked for. A line of the file is an object with
the keys of ``TaskRequest``. Requests of one group belong to one example: the choices of a question, or the gold answer
alone. ``hlat evaluate --render`` makes them of tasks of lm-eval.

Rows are padded to one of a few lengths, so that short rows cost less than complete sequences. Padding comes last, where
causal attention does not look at it.

There is no cache of keys and values, which layouts with pipeline or context parallelism could not keep: a token of a
sample costs a forward pass over its row. Samples are meant to be few and short.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.config import RecipeError, own_parts
from hlat.data import Tokenizer
from hlat.model import IGNORED, Reduction, next_tokens, row_losses
from hlat.parallel import MicroBatch
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.terminal import listed
from hlat.training.validation.losses import LossEvaluator, split_batches

_SHOWN_PROBLEMS = 10  # problems of a file that an error lists


class TaskRequest(BaseModel):
    """A line of a file of requests.

    Attributes:
        task: name of the task.
        group: example of the task that the request belongs to.
        context: text before the continuation.
        continuation: text whose likelihood is asked for; begins with the space between it and the context, if any.
        is_gold: True for a right answer.
        characters: characters by which the log-likelihood is divided for ``acc_norm``; those of the continuation
            without white space at its ends if not given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    group: int
    context: str
    continuation: Annotated[str, Field(min_length=1)]
    is_gold: bool
    characters: Annotated[int, Field(gt=0)] | None = None

    @property
    def normalization(self) -> int:
        """Number of characters that the log-likelihood is divided by, at least 1."""
        return self.characters or max(1, len(self.continuation.strip()))


class TokenRow(NamedTuple):
    """Tokens of a request: the last ``asked`` ones are the continuation."""

    tokens: tuple[int, ...]
    asked: int


def read_requests(files: Sequence[str | Path]) -> list[TaskRequest]:
    """Read files of requests; a name of a task of the user's own stands for what that returns.

    Raises:
        RecipeError: there is no such task.
        DataError: a file cannot be read, has lines that are no requests, or examples without a gold answer; lists them.
    """
    requests: list[TaskRequest] = []
    problems: list[str] = []
    for file in files:
        name = str(file)
        found, wrong = _call_task(name) if own_parts.TASKS.has(name) else _read_request_file(Path(file))
        requests += found
        problems += wrong
    golds = {(request.task, request.group): False for request in requests}
    for request in requests:
        golds[request.task, request.group] |= request.is_gold
    problems += [f"task {task}, group {group}: no answer is gold" for (task, group), gold in golds.items() if not gold]
    _raise_if_any(problems)
    return requests


def load_task(name: str) -> Callable[[], Iterable[Any]]:
    """Import a task of the user's own: a function without arguments that returns requests, or what they consist of."""
    task: Callable[[], Iterable[Any]] = own_parts.load_part(
        own_parts.TASKS, "evaluation.tasks", name, "a function", callable
    )
    return task


def _call_task(name: str) -> tuple[list[TaskRequest], list[str]]:
    requests, problems = [], []
    try:
        for number, each in enumerate(load_task(name)(), start=1):
            try:
                requests.append(TaskRequest.model_validate(each))
            except ValidationError as error:
                problems.append(f"{name}, request {number}: {_first_problem(error)}")
    except RecipeError:
        raise
    except Exception as error:  # code of the user's own may raise anything
        problems.append(f"{name} fails: {type(error).__name__}: {error}")
    if not requests and not problems:
        problems.append(f"{name} has no requests")
    return requests, problems


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where + ': ' if where else ''}{first['msg']}"


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise DataError(f"evaluation.tasks:\n{listed(problems, _SHOWN_PROBLEMS, chr(10))}")


def _read_request_file(file: Path) -> tuple[list[TaskRequest], list[str]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{file} cannot be read: {error}"]
    requests, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(TaskRequest.model_validate_json(line))
        except ValidationError as error:
            problems.append(f"{file}, line {number}: {_first_problem(error)}")
    if not requests and not problems:
        problems.append(f"{file} has no requests")
    return requests, problems


def write_requests(file: Path, requests: Sequence[TaskRequest]) -> None:
    """Write a file of requests, one JSON object per line; raises StorageError."""
    lines = [json.dumps(request.model_dump(exclude_none=True), ensure_ascii=False) for request in requests]
    try:
        write_atomic(file, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error}") from error


def encode_requests(requests: Sequence[TaskRequest], tokenizer: Tokenizer, longest: int) -> list[TokenRow]:
    """Encode requests to rows of at most ``longest`` tokens; longer texts lose tokens at their beginning.

    Raises:
        DataError: a continuation has more tokens than a row, or there is nothing to predict it from; lists them.
    """
    rows, problems = [], []
    for request in requests:
        row, problem = _encode_request(request, tokenizer, longest)
        rows.append(row)
        problems += [f"task {request.task}, group {request.group}: {problem}"] if problem else []
    _raise_if_any(problems)
    return rows


def _encode_request(request: TaskRequest, tokenizer: Tokenizer, longest: int) -> tuple[TokenRow, str]:
    context = request.context.rstrip()
    # As in lm-eval: white space at the end of a context belongs to its continuation, whose tokens are those that the
    # whole text has after the context's. A tokenizer may not cut a text at the same place.
    continuation = request.context[len(context) :] + request.continuation
    if context:
        before = tokenizer.encode_prompt(context)
        after = tokenizer.encode_prompt(context + continuation)[len(before) :]
    else:
        begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        before, after = [] if begin is None else [begin], tokenizer.encode(continuation)
    row = TokenRow(tuple([*before, *after][-(longest + 1) :]), len(after))
    if not before:
        return row, "the context is empty, and the tokenizer has no token that begins a text. Give it a context."
    if not after or len(after) > longest:
        return row, f"the continuation has {len(after)} tokens, and a row has {longest} (data.sequence_length)."
    return row, ""


_SHORTEST_ROW = 128  # tokens: shorter rows are not faster


def row_lengths(longest: int, multiple: int) -> list[int]:
    """Return the padded lengths, ascending: halves of the longest that are multiples of ``multiple``."""
    lengths = [longest]
    while lengths[-1] // 2 >= _SHORTEST_ROW and lengths[-1] % (2 * multiple) == 0:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def pad_rows(rows: Sequence[TokenRow], size: int, length: int, isolate: bool) -> MicroBatch:
    """Pad rows to a batch of ``size`` rows of ``length`` tokens; only tokens of continuations are labels."""
    inputs_BS = torch.zeros(size, length, dtype=torch.int64)
    labels_BS = torch.full((size, length), IGNORED, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens, last = torch.tensor(row.tokens), len(row.tokens) - 1
        inputs_BS[index, :last] = tokens[:-1]
        labels_BS[index, last - row.asked : last] = tokens[-row.asked :]
    positions_BS = torch.arange(length).expand(size, -1).contiguous() if isolate else None
    return MicroBatch(inputs_BS, labels_BS, positions_BS)


@dataclass(frozen=True)
class TaskScore:
    """Scores of a task; accuracies are None if it has gold answers only."""

    examples: int
    accuracy: float | None  # share of the examples whose most likely choice is right; None if it has gold answers only
    normalized_accuracy: float | None  # the same with log-likelihoods per character
    bits_per_byte: float  # bits per UTF-8 byte of the gold answers: mean over the examples

    def columns(self, task: str) -> dict[str, float]:
        named = {"acc": self.accuracy, "acc_norm": self.normalized_accuracy, "bits_per_byte": self.bits_per_byte}
        return {f"task/{task}/{name}": value for name, value in named.items() if value is not None}


def score_requests(model: LossEvaluator, rows: Sequence[TokenRow], longest: int, batch_size: int) -> list[float]:
    """Return the log-likelihood of each row's continuation in nats, the same on every rank. Collective.

    ``batch_size`` rows of length ``longest`` make a batch; a batch of shorter rows has more, up to as many tokens.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    lengths = row_lengths(longest, model.row_multiple)
    for index, row in enumerate(rows):
        by_length[next(length for length in lengths if length >= len(row.tokens) - 1)].append(index)
    nats = torch.zeros(len(rows), dtype=torch.float64)
    for length, members in sorted(by_length.items(), reverse=True):  # most memory first
        size = batch_size * longest // length
        _evaluate_padded(model, rows, members, (size, length), nats)
    return [-value for value in model.sum_over_world(nats).tolist()]


def _evaluate_padded(
    model: LossEvaluator,
    rows: Sequence[TokenRow],
    members: Sequence[int],
    padded: tuple[int, int],
    values: torch.Tensor,
    reduction: Reduction = row_losses,
) -> None:
    """Set this rank's terms of the values of some rows, in batches of ``padded`` size and length. Collective."""
    size, length = padded
    mine = split_batches(members, size, model.data_ranks, model.data_index)
    batches = [pad_rows([rows[index] for index in batch], size, length, model.isolates) for batch in mine]
    found = model.evaluate_rows(batches, reduction)
    for number, batch in enumerate(mine):
        values[batch] = found[number * size : number * size + len(batch)]


def task_scores(requests: Sequence[TaskRequest], likelihoods: Sequence[float]) -> dict[str, TaskScore]:
    """Compute the scores of each task from the log-likelihoods of its requests, in nats."""
    examples: dict[str, dict[int, list[tuple[TaskRequest, float]]]] = defaultdict(lambda: defaultdict(list))
    for request, likelihood in zip(requests, likelihoods, strict=True):
        examples[request.task][request.group].append((request, likelihood))
    return {task: _task_score(list(groups.values())) for task, groups in examples.items()}


def _task_score(examples: Sequence[Sequence[tuple[TaskRequest, float]]]) -> TaskScore:
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
    # The most likely one, if there are several gold answers.
    return min(
        -value / (math.log(2) * len(request.continuation.encode())) for request, value in choices if request.is_gold
    )


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their token ids, and the number of tokens that each is continued by at most."""

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]  # their token ids, with a BOS token if the tokenizer adds one
    tokenizer: Tokenizer  # decodes the new tokens; its end-of-sequence token ends a text
    most: int  # tokens by which each is continued at most

    def continue_all(self, model: LossEvaluator, longest: int, batch_size: int) -> tuple[tuple[str, str], ...]:
        """Return each prompt with its continuation, the same on every rank. Collective."""
        found = continue_rows(model, self.tokens, self.most, self.tokenizer.eos_id, longest, batch_size)
        return tuple((text, self.tokenizer.decode(new)) for text, new in zip(self.texts, found, strict=True))


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, most: int, longest: int) -> PromptSet:
    """Encode the prompts of ``evaluation.prompts``; raises DataError if one has no tokens, or more than a row."""
    tokens = [tokenizer.encode_prompt(text) for text in texts]
    problems = [
        f"{text!r} has {len(ids)} tokens: a prompt has 1 to {longest} (data.sequence_length)"
        for text, ids in zip(texts, tokens, strict=True)
        if not 1 <= len(ids) <= longest
    ]
    if problems:
        raise DataError("\n".join(["evaluation.prompts:", *problems]))
    return PromptSet(texts, tokens, tokenizer, most)


def continue_rows(
    model: LossEvaluator,
    prompts: Sequence[Sequence[int]],
    most: int,
    end: int | None,
    longest: int,
    batch_size: int,
) -> list[list[int]]:
    """Continue rows of tokens greedily; return the new tokens, the same on every rank. Collective.

    A row ends with the end token, which is not returned, after ``most`` new tokens, or when it is full.
    """
    rows, open_rows = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    for _ in range(most):
        open_rows = [index for index in open_rows if len(rows[index]) <= longest]
        if not open_rows:
            break
        chosen = _choose_next_tokens(model, [rows[index] for index in open_rows], longest, batch_size)
        going = [(index, token) for index, token in zip(open_rows, chosen, strict=True) if token != end]
        for index, token in going:
            rows[index].append(token)
        open_rows = [index for index, _ in going]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _choose_next_tokens(
    model: LossEvaluator, rows: Sequence[Sequence[int]], longest: int, batch_size: int
) -> list[int]:
    """Return the most likely next token of each row. Collective."""
    lengths = row_lengths(longest, model.row_multiple)
    length = next(length for length in lengths if length >= max(len(row) for row in rows))
    size = min(batch_size * longest // length, -(-len(rows) // model.data_ranks))
    asked = [TokenRow((*row, 0), 1) for row in rows]  # the last one is only the place of the label
    # Ids are summed over the ranks as float64, which is exact.
    found = torch.zeros(len(rows), dtype=torch.float64)
    _evaluate_padded(model, asked, range(len(rows)), (size, length), found, next_tokens)
    return [int(value) for value in model.sum_over_world(found).tolist()]
