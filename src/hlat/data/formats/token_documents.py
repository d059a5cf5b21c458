"""Documents that are tokens already, of Megatron-LM's .bin and .idx: checked against the tokenizer, as rows.

    tokens of a document --all in the vocabulary?--> without the end token that may stand last --> Row

Where tokens are put away each document gets an end token, whatever it came from. So it is taken off here: a dataset
written with --append-eod has the same documents, hashes and tails as one written without.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hlat.data.formats.megatron import MegatronDataset, StoredTokens
from hlat.data.formats.records import Row
from hlat.data.tokenizers import TokenIdArray, Tokenizer
from hlat.runtime import DataError


class Vocabulary(NamedTuple):
    """What tokens may be: ids below ``size``; ``end`` is the one that ends a document, None where nothing does."""

    size: int
    end: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """That of a tokenizer."""
        return cls(tokenizer.vocab_size, tokenizer.eos_id)


class TokenDocuments:
    """The documents of one dataset, by their number.

    Args:
        data: the .bin.
        index: its .idx.
        vocabulary: of the tokenizer that the tokens are of.

    Raises:
        DataError: as MegatronDataset.
    """

    def __init__(self, data: Path, index: Path, vocabulary: Vocabulary) -> None:
        self._data, self._vocabulary = data, vocabulary
        self._dataset = MegatronDataset(data, index)
        self._bytes = self._dataset.tokens * self._dataset.dtype.itemsize

    def rows(self, start: int, stop: int | None = None) -> Iterator[Row]:
        """The documents ``start <= row < stop``, all of them where ``stop`` is None; tokens are uint32.

        Raises:
            DataError: a token that the vocabulary does not have.
        """
        total = len(self._dataset)
        for number in range(start, total if stop is None else stop):
            tokens = self._checked(number, self._dataset.document(number))
            yield Row(number, tokens, self._bytes * (number + 1) // total)

    def _checked(self, number: int, tokens: StoredTokens) -> TokenIdArray:
        size, end = self._vocabulary
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            place = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
            raise DataError(
                f"{self._data}, document {number}: token {place} of it has the id {tokens[place]}, and the ids of "
                f"data.tokenizer.path are 0 to {size - 1}. Give the tokenizer that the dataset was written with."
            )
        body = tokens[:-1] if end is not None and len(tokens) and tokens[-1] == end else tokens
        return body.astype(np.uint32)
