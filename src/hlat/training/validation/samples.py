"""Samples of text while training: prompts continued by the most likely tokens, in any parallel layout.

    prompts --next_tokens, one forward pass per token--> tokens --> texts --> samples.jsonl

There is no cache of keys and values, which layouts with pipeline or context parallelism could not keep: a token costs a
forward pass over its row. Samples are meant to be few and short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hlat.data import Tokenizer
from hlat.model import next_tokens
from hlat.runtime.errors import DataError
from hlat.training.validation.batching import split_batches
from hlat.training.validation.losses import LossEvaluator
from hlat.training.validation.requests import TokenRow
from hlat.training.validation.rows import pad_rows, row_lengths


@dataclass(frozen=True)
class PromptSet:
    """Prompts to continue.

    Attributes:
        texts: the prompts.
        tokens: their token ids, with a BOS token if the tokenizer adds one.
        tokenizer: decodes the new tokens; its end-of-sequence token ends a text.
        most: tokens by which each is continued at most.
    """

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    tokenizer: Tokenizer
    most: int

    def continue_all(self, model: LossEvaluator, longest: int, batch_size: int) -> tuple[tuple[str, str], ...]:
        """Continue the prompts; return each with its new text, the same on every rank. Collective.

        Args:
            model: model that continues them.
            longest: length of the longest rows, S.
            batch_size: rows of that length in a batch.
        """
        found = continue_rows(model, self.tokens, self.most, self.tokenizer.eos_id, longest, batch_size)
        return tuple((text, self.tokenizer.decode(new)) for text, new in zip(self.texts, found, strict=True))


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, most: int, longest: int) -> PromptSet:
    """Encode the prompts of ``evaluation.prompts``.

    Args:
        texts: the prompts.
        tokenizer: encodes them as in training.
        most: tokens by which each is continued at most.
        longest: length of the longest rows.

    Raises:
        DataError: prompts have no tokens, or more than a row; lists them.
    """
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
    """Continue rows of tokens by the most likely ones; return the new tokens, the same on every rank. Collective.

    A row ends with the end token, which is not returned, after ``most`` new tokens, or when it is full.

    Args:
        model: model that continues them.
        prompts: token ids, 1 to ``longest`` each.
        most: new tokens at most.
        end: id of the token that ends a text; None for no such token.
        longest: length of the longest rows, S.
        batch_size: rows of that length in a batch; a batch of shorter rows has more, up to as many tokens.
    """
    rows, open_rows = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    for _ in range(most):
        open_rows = [index for index in open_rows if len(rows[index]) <= longest]
        if not open_rows:
            break
        chosen = _choose_next(model, [rows[index] for index in open_rows], longest, batch_size)
        going = [(index, token) for index, token in zip(open_rows, chosen, strict=True) if token != end]
        for index, token in going:
            rows[index].append(token)
        open_rows = [index for index, _ in going]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _choose_next(model: LossEvaluator, rows: Sequence[Sequence[int]], longest: int, batch_size: int) -> list[int]:
    """Return the most likely next token of each row. Collective.

    Ids are summed over the ranks as float64, which is exact.
    """
    lengths = row_lengths(longest, model.row_multiple)
    length = next(length for length in lengths if length >= max(len(row) for row in rows))
    size = min(batch_size * longest // length, -(-len(rows) // model.data_ranks))
    mine = split_batches(range(len(rows)), size, model.data_ranks, model.data_index)
    asked = [TokenRow((*row, 0), 1) for row in rows]  # the last one is only the place of the label
    batches = [pad_rows([asked[index] for index in batch], size, length, model.isolates) for batch in mine]
    ids = model.evaluate_rows(batches, next_tokens)
    found = ids.new_zeros(len(rows))
    for number, batch in enumerate(mine):
        found[batch] = ids[number * size : number * size + len(batch)]
    return [int(value) for value in model.sum_over_world(found).tolist()]
