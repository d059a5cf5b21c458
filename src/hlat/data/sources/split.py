"""A document goes to training or to validation, by its own content or place and nothing else.

Which worker sees it, when, and what other documents there are does not matter, so the split of a corpus is the same
for any number of workers and survives interruptions. Chosen by hash of the text or the tokens, exact
duplicates of a document land on the same side.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from hlat.data.formats import ContentT

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

_KEY = b"hlat validation split"


def hash_threshold(fraction: float) -> int:
    """The documents whose 64-bit hash lies below this are a share ``fraction`` of all."""
    return int(fraction * 2.0**64)


def tail_start(length: int, fraction: float) -> int:
    """The character, or token, of a source at which its tail begins: int(n * (1 - fraction)), as nanoGPT cuts."""
    return int(length * (1 - fraction))


@dataclass(frozen=True)
class SplitRule:
    """How the documents of one unit are dealt to the splits.

    Attributes:
        below: documents whose hash lies below this are validation.
        boundary: characters, or tokens, from the start of the unit from which on they are validation; None for none.
    """

    below: int = 0
    boundary: int | None = None

    def split_document(self, content: ContentT, encoded: bytes, offset: int) -> list[tuple[Split, ContentT]]:
        """The parts of a document and where each goes; a document is cut only where a tail begins inside it.

        Args:
            content: the document.
            encoded: the same as ``as_bytes`` gives it.
            offset: characters of the unit before this document, or tokens where it has tokens.
        """
        if self.boundary is None:
            return [(self.split_of(encoded), content)]
        cut = min(max(self.boundary - offset, 0), len(content))
        parts: list[tuple[Split, ContentT]] = [("train", content[:cut]), ("validation", content[cut:])]
        return [part for part in parts if len(part[1])]

    def split_of(self, encoded: bytes) -> Split:
        """Where a document goes, as ``as_bytes`` gives it, unless there is a boundary."""
        return "validation" if self.below > 0 and _hash(encoded) < self.below else "train"


ALL_VALIDATION = SplitRule(boundary=0)


def _hash(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_KEY).digest(), "little")
