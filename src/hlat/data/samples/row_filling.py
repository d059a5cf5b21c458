"""Stretches of documents -> one row of S inputs and S labels. Also run where text is tokenized, hence without torch.

A label is the token after its input. Where documents are isolated there is none at the end of a document, and places
are counted from its beginning, or from that of the row. What is left of a row is padding: input 0, no label.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_LABEL = -1

Numbers = npt.NDArray[Any]


class RowSegment(NamedTuple):
    """Consecutive tokens of a row.

    Attributes:
        tokens: the inputs, and after them the label of the last one, if there is one.
        length: how many are inputs.
        opens: whether the first one begins a document.
        begins: places in ``tokens``, after the first, at which documents begin; only looked at to isolate them.
    """

    tokens: Numbers
    length: int
    starts_document: bool
    document_starts: Numbers


def fill_row(parts: Iterable[RowSegment], inputs_S: Numbers, labels_S: Numbers, positions_S: Numbers | None) -> None:
    """Write a row.

    Args:
        parts: in order, of S tokens at most.
        inputs_S: filled with token ids.
        labels_S: filled with token ids, and with ``NO_LABEL``.
        positions_S: filled with the place of each token in its document, which isolates them; None for joined ones.
    """
    inputs_S[:], labels_S[:], place = 0, NO_LABEL, 0
    for part in parts:
        end = place + part.length
        inputs_S[place:end] = part.tokens[: part.length]
        labels_S[place : place + len(part.tokens) - 1] = part.tokens[1:]
        if positions_S is not None:
            positions_S[place:end] = _places(part)
            labels_S[place + part.document_starts - 1] = NO_LABEL
        elif part.starts_document and place > 0:
            labels_S[place - 1] = part.tokens[0]  # joined, a document's end is followed by the next one's begin
        place = end
    if positions_S is not None:
        positions_S[place:] = np.arange(len(positions_S) - place)


def _places(part: RowSegment) -> Numbers:
    inside = part.document_starts[part.document_starts < part.length]
    places = np.arange(part.length)
    if len(inside):
        starts = np.concatenate([[0], inside])
        places -= np.repeat(starts, np.diff(np.append(starts, part.length)))
    return places
