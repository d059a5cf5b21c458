"""Filling of a row of S inputs and S labels from segments of documents; tokenizing workers use it too, so no torch.

A label is the token after its input. If documents are isolated, the last token of a document has no label, and
positions count from the start of the document, or of the row if that is later. The rest of a row is padding: input 0,
no label.
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
        tokens: the inputs, followed by the label of the last one if there is one.
        length: number of inputs.
        starts_document: True if the first token begins a document.
        document_starts: indexes in ``tokens``, after the first, at which documents begin; used only to isolate them.
    """

    tokens: Numbers
    length: int
    starts_document: bool
    document_starts: Numbers


def fill_row(segments: Iterable[RowSegment], inputs_S: Numbers, labels_S: Numbers, positions_S: Numbers | None) -> None:
    """Write one row into the given arrays, each of shape (S,).

    Args:
        segments: segments in order, S tokens at most.
        inputs_S: filled with token ids.
        labels_S: filled with token ids and ``NO_LABEL``.
        positions_S: filled with the position of each token in its document, to isolate documents; None to join them.
    """
    inputs_S[:], labels_S[:], position = 0, NO_LABEL, 0
    for segment in segments:
        end = position + segment.length
        inputs_S[position:end] = segment.tokens[: segment.length]
        labels_S[position : position + len(segment.tokens) - 1] = segment.tokens[1:]
        if positions_S is not None:
            positions_S[position:end] = _positions(segment)
            labels_S[position + segment.document_starts - 1] = NO_LABEL
        elif segment.starts_document and position > 0:
            # Documents are joined: the label of a document's last token is the first token of the next.
            labels_S[position - 1] = segment.tokens[0]
        position = end
    if positions_S is not None:
        positions_S[position:] = np.arange(len(positions_S) - position)


def _positions(segment: RowSegment) -> Numbers:
    """Return the position of each input in its document, shape (length,)."""
    inside = segment.document_starts[segment.document_starts < segment.length]
    positions = np.arange(segment.length)
    if len(inside):
        starts = np.concatenate([[0], inside])
        positions -= np.repeat(starts, np.diff(np.append(starts, segment.length)))
    return positions
