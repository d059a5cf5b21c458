"""Assign documents to the training or the validation split, by their content or position alone.

The assignment does not depend on the worker, on time, or on other documents. So the split of a corpus is the same for
any number of workers and after interruptions. If it is made by hash of the text or the tokens, exact copies of a
document are in the same split.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from hlat.data.formats.document import ContentT

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

_KEY = b"hlat validation split"


def hash_threshold(fraction: float) -> int:
    """Return the threshold below which the 64-bit hashes of a share ``fraction`` of all documents lie."""
    return int(fraction * 2.0**64)


def tail_start(length: int, fraction: float) -> int:
    """Return the character or token at which the validation tail of a source begins: int(n * (1 - fraction)).

    This is the cut that nanoGPT makes.
    """
    return int(length * (1 - fraction))


@dataclass(frozen=True)
class SplitRule:
    """Rule that assigns the documents of one work unit to the splits.

    Attributes:
        below: documents whose hash lies below this are validation documents; ignored if there is a boundary.
        boundary: characters (or tokens) of the unit before its validation tail; None for no tail.
    """

    below: int = 0
    boundary: int | None = None

    def split_document(self, content: ContentT, encoded: bytes, offset: int) -> list[tuple[Split, ContentT]]:
        """Assign a document to a split; cut it in two if the validation tail begins inside it.

        Args:
            content: the document.
            encoded: the document as ``content_bytes`` returns it.
            offset: characters (or tokens) of the unit before this document.

        Returns:
            The split and content of each piece that is not empty.
        """
        if self.boundary is None:
            return [(self.split_of(encoded), content)]
        cut = min(max(self.boundary - offset, 0), len(content))
        pieces: list[tuple[Split, ContentT]] = [("train", content[:cut]), ("validation", content[cut:])]
        return [piece for piece in pieces if len(piece[1])]

    def split_of(self, encoded: bytes) -> Split:
        """Return the split of a document by the hash of its ``content_bytes``; the boundary is ignored."""
        return "validation" if self.below > 0 and _hash(encoded) < self.below else "train"


def hash_share(encoded: bytes) -> float:
    """Return the fraction of the corpus above which a document, as ``content_bytes`` returns it, is for validation."""
    return _hash(encoded) / 2.0**64


ALL_VALIDATION = SplitRule(boundary=0)


def _hash(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_KEY).digest(), "little")
