"""A document goes to training or to validation, by its own content or place and nothing else.

Which worker sees it, when, and what other documents there are does not matter, so the split of a corpus is the same
for any number of workers and survives interruptions. Chosen by hash of the text, exact duplicates of a document
land on the same side.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

_KEY = b"hlat validation split"


def hash_threshold(fraction: float) -> int:
    """The documents whose 64-bit hash lies below this are a share ``fraction`` of all."""
    return int(fraction * 2.0**64)


def tail_start(characters: int, fraction: float) -> int:
    """The character of a source at which its validation tail begins: int(n * (1 - fraction)), as nanoGPT cuts."""
    return int(characters * (1 - fraction))


@dataclass(frozen=True)
class Assignment:
    """How the documents of one unit are dealt to the splits.

    Attributes:
        below: documents whose hash lies below this are validation.
        boundary: characters from the start of the unit from which on text is validation; None for no such place.
    """

    below: int = 0
    boundary: int | None = None

    def pieces(self, text: str, encoded: bytes, offset: int) -> list[tuple[Split, str]]:
        """The parts of a document and where each goes; a document is cut only where a tail begins inside it.

        Args:
            text: the document.
            encoded: the same in UTF-8.
            offset: characters of the unit before this document.
        """
        if self.boundary is None:
            held_out = self.below > 0 and _hash(encoded) < self.below
            return [("validation" if held_out else "train", text)]
        cut = min(max(self.boundary - offset, 0), len(text))
        parts: list[tuple[Split, str]] = [("train", text[:cut]), ("validation", text[cut:])]
        return [part for part in parts if part[1]]


ALL_VALIDATION = Assignment(boundary=0)


def _hash(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_KEY).digest(), "little")
