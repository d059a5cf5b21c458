"""Documents of Megatron-LM's .bin and .idx files, which are tokens already: checked against the tokenizer, as rows.

    tokens of a document --all in the vocabulary?--> end-of-sequence token removed, if it is last --> Row

When shards are written, every document gets an end-of-sequence token. So it is removed here: a dataset written with
--append-eod has the same documents, hashes and validation tail as one written without.
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
    """Valid token ids.

    Attributes:
        size: ids are below this.
        eos_id: id of the end-of-sequence token; None for none.
    """

    size: int
    eos_id: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Return the vocabulary of a tokenizer."""
        return cls(tokenizer.vocab_size, tokenizer.eos_id)


class TokenDocuments:
    """Documents of one Megatron-LM dataset, by their index.

    Args:
        data: the .bin file.
        index: its .idx file.
        vocabulary: valid token ids.

    Raises:
        DataError: see MegatronDataset.
    """

    def __init__(self, data: Path, index: Path, vocabulary: Vocabulary) -> None:
        self._data, self._vocabulary = data, vocabulary
        self._dataset = MegatronDataset(data, index)
        self._bytes = self._dataset.tokens * self._dataset.dtype.itemsize

    def rows(self, start: int, stop: int | None = None) -> Iterator[Row]:
        """Yield the documents ``start <= row < stop``, to the end if ``stop`` is None; tokens are uint32.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        total = len(self._dataset)
        for number in range(start, total if stop is None else stop):
            tokens = self._check(number, self._dataset.document(number))
            yield Row(number, tokens, self._bytes * (number + 1) // total)

    def _check(self, number: int, tokens: StoredTokens) -> TokenIdArray:
        size, eos_id = self._vocabulary
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            position = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
            raise DataError(
                f"{self._data}, document {number}: its token {position} has the id {tokens[position]}, but the ids of "
                f"data.tokenizer.path are 0 to {size - 1}. Give the tokenizer that the dataset was written with."
            )
        body = tokens[:-1] if eos_id is not None and len(tokens) and tokens[-1] == eos_id else tokens
        return body.astype(np.uint32)
