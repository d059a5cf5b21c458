"""Requests of evaluation tasks, rendered before training: continuations whose likelihood is asked for.

    FILE.jsonl --read_requests--> TaskRequest --encode_requests--> TokenRow: input tokens, and how many are asked for

A line of the file is an object with the keys of ``TaskRequest``. Requests of one group belong to one example: the
choices of a question, or the gold answer alone. ``hlat evaluate --render`` makes them of tasks of lm-eval.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.data import Tokenizer, write_atomic
from hlat.runtime.errors import DataError, StorageError

_SHOWN = 10  # problems of a file that an error lists


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
        """Number of characters that the log-likelihood is divided by."""
        return self.characters or max(1, len(self.continuation.strip()))


class TokenRow(NamedTuple):
    """Tokens of a request: the last ``asked`` ones are the continuation."""

    tokens: tuple[int, ...]
    asked: int


def read_requests(files: Sequence[str | Path]) -> list[TaskRequest]:
    """Read files of requests.

    Raises:
        DataError: a file cannot be read, has lines that are no requests, or examples without a gold answer; lists them.
    """
    requests: list[TaskRequest] = []
    problems: list[str] = []
    for file in files:
        found, wrong = _read_file(Path(file))
        requests += found
        problems += wrong
    golds = {(request.task, request.group): False for request in requests}
    for request in requests:
        golds[request.task, request.group] |= request.is_gold
    problems += [f"task {task}, group {group}: no answer is gold" for (task, group), gold in golds.items() if not gold]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise DataError("\n".join(["evaluation.tasks:", *problems[:_SHOWN], *more]))
    return requests


def _read_file(file: Path) -> tuple[list[TaskRequest], list[str]]:
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
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            problems.append(f"{file}, line {number}: {where + ': ' if where else ''}{first['msg']}")
    if not requests and not problems:
        problems.append(f"{file} has no requests")
    return requests, problems


def write_requests(file: Path, requests: Sequence[TaskRequest]) -> None:
    """Write a file of requests, one JSON object per line.

    Raises:
        StorageError: the file cannot be written.
    """
    lines = [json.dumps(request.model_dump(exclude_none=True), ensure_ascii=False) for request in requests]
    try:
        write_atomic(file, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error}") from error


def encode_requests(requests: Sequence[TaskRequest], tokenizer: Tokenizer, longest: int) -> list[TokenRow]:
    """Encode requests to the tokens of rows.

    White space at the end of a context moves to its continuation, and the tokens of the continuation are those that
    the whole text has after the context's, as in lm-eval: a tokenizer may not cut a text at the same place. A text
    that is too long loses tokens at its beginning.

    Args:
        requests: requests.
        tokenizer: encodes texts as in training, with a BOS token if it adds one.
        longest: most input tokens of a row.

    Raises:
        DataError: a continuation has more tokens than a row, or there is nothing to predict it from; lists them.
    """
    rows, problems = [], []
    for request in requests:
        row, problem = _encode(request, tokenizer, longest)
        rows.append(row)
        problems += [f"task {request.task}, group {request.group}: {problem}"] if problem else []
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise DataError("\n".join(["evaluation.tasks:", *problems[:_SHOWN], *more]))
    return rows


def _encode(request: TaskRequest, tokenizer: Tokenizer, longest: int) -> tuple[TokenRow, str]:
    context = request.context.rstrip()
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
