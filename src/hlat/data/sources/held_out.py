"""Validation text of each source, kept aside by whole documents: how much there is, and whether it is enough.

counts of each source, before or after preparation --describe_scarce--> a warning, or none
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hlat.runtime.terminal_text import plural

_ENOUGH_TOKENS = 10_000
"""Tokens for which the error of a mean loss is small: the losses of single tokens vary by 2 to 3 nats, so that the mean
of 10,000 tokens is known to 0.03 nats at best, less exactly if they are of few documents."""
_ENOUGH_DOCUMENTS = 5  # of a source, over which a loss says something about the others
_NAMED = 3  # sources that a message names
_LARGEST_SHARE = 0.2  # that is suggested; a corpus that needs more is too small


class HeldOut(NamedTuple):
    """Text of a source that is kept aside for validation.

    Attributes:
        source: name or path of the source.
        documents: documents kept aside.
        of_documents: all documents of the source.
        tokens: tokens kept aside.
        of_tokens: all tokens of the source.
    """

    source: str
    documents: int
    of_documents: int
    tokens: float
    of_tokens: float

    @property
    def is_scarce(self) -> bool:
        """True if the loss over this text says little about the source."""
        return self.tokens < _ENOUGH_TOKENS and self.documents < _ENOUGH_DOCUMENTS


def describe_scarce(held: Sequence[HeldOut], fraction: float, about: str = "") -> tuple[str, str] | None:
    """Describe the sources with too little validation text, for data.validation.by=document.

    Args:
        held: the sources of the corpus.
        fraction: data.validation.fraction.
        about: "about " if tokens are estimated.

    Returns:
        What is wrong, and what would work; None if nothing is.
    """
    scarce = [each for each in held if each.of_documents and each.is_scarce]
    if not scarce:
        return None
    parts = [
        f"{each.documents:,} of {each.of_documents:,} {'document' if each.of_documents == 1 else 'documents'} of "
        f"{each.source} ({about}{each.tokens:,.0f} tokens)"
        for each in scarce
    ]
    text = f"{_listed(parts)} for validation, chosen by hash: a loss over so little text says little."
    least = min(scarce, key=lambda each: each.of_tokens)
    needed = max(fraction, _ENOUGH_TOKENS / least.of_tokens)
    tail = f"data.validation.by=tail keeps the last {fraction:.3g} of each source: {_tail(scarce, fraction)}"
    if needed > _LARGEST_SHARE:
        return text, f"{tail}. Or give a file of validation text of its own as data.validation.path."
    share = math.ceil(needed * 100) / 100
    return text, f"{tail}; with data.validation.fraction={share:.3g} {_tail(scarce, share)}."


def _tail(sources: Sequence[HeldOut], fraction: float) -> str:
    return _listed([f"about {each.of_tokens * fraction:,.0f} tokens of {each.source}" for each in sources])


def _listed(parts: Sequence[str]) -> str:
    """Join the first three parts; say how many more there are."""
    more = [f"{plural(len(parts) - _NAMED, 'other source')} alike"] if len(parts) > _NAMED else []
    return " and ".join([*parts[:_NAMED], *more])
