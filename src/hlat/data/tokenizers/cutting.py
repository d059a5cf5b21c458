"""Cut long texts where this cannot change their tokens.

    text --cut where it is proven safe--> chunks --encode--> the tokens of the text

A long document is encoded in chunks where this cannot change the tokens, so that memory stays bounded. A
byte-level BPE tokenizer first splits the text with a regular expression; merges never cross the splits. A cut changes
nothing if the expression has the same matches on the two halves as on the full text. Cuts are made before a single
space or line break between two ASCII letters, ``a|_b``. For the expressions listed below, such a cut is proven safe:

1. No alternative can match an ASCII letter followed by white space, so in the full text a match ends at the cut.
2. Left half: the match that ends with the letter before the cut is a greedy run of letters (or a contraction), which
   ends at a non-letter or at the end of the text. There are only two look-aheads. The one for the last white space
   of a run begins with white space, so it is never tried at that letter. "No letter follows" is true at the cut and
   at the end of the text.
3. Right half: it starts with exactly one white-space character and a letter, and no expression looks behind, so the
   matches from the cut on depend only on the text after it.

The tests check this on random texts for every listed expression. For any other tokenizer, texts are not cut.
"""

import re
from collections.abc import Iterator
from typing import Any

# The expression of the tokenizers that hlat trains: contractions; words with their combining marks and the space
# before them; single digits (so that a number of any length has one segmentation); punctuation with the line ends
# after it; line ends with the white space before them; other white space.
OWN_PATTERN = (
    r"'(?i:s|t|d|m|ll|re|ve)(?!\p{L})"
    r"| ?\p{L}[\p{L}\p{M}]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
# Published expressions, from their tokenizer.json: Llama 3 (up to three digits) and Qwen 2 (single digits).
_PUBLISHED_PATTERNS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
]
QWEN2_PATTERN = _PUBLISHED_PATTERNS[1]
_BUILT_IN = object()  # stands for GPT-2's expression, which the library has and no tokenizer.json spells out
_PROVEN_PATTERNS = (OWN_PATTERN, *_PUBLISHED_PATTERNS, _BUILT_IN)

_CUT = re.compile(r"(?<=[A-Za-z])[ \n](?=[A-Za-z])")


def cut_text(text: str, min_chars: int, places: re.Pattern[str] = _CUT, dropped: int = 0) -> Iterator[str]:
    """Cut a text before white space between two ASCII letters, into chunks of at least ``min_chars`` characters.

    Without such a place a chunk can be much longer, and the last one shorter. ``min_chars`` is at least 1. Of other
    ``places``, ``dropped`` characters belong to no chunk.
    """
    start = 0
    while len(text) - start > min_chars and (cut := places.search(text, start + min_chars)):
        yield text[start : cut.start()]
        start = cut.start() + dropped
    yield text[start:] if start else text


def cuts_preserve_tokens(description: dict[str, Any]) -> bool:
    """Return True if the tokenizer of a parsed tokenizer.json gives chunks the tokens of the uncut text."""
    model = description.get("model") or {}
    return (
        description.get("normalizer") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        # Other added tokens are found in a text before it is split.
        and all(token["special"] for token in description.get("added_tokens", []))
        and split_pattern(description.get("pre_tokenizer")) in _PROVEN_PATTERNS
    )


def split_pattern(pre_tokenizer: dict[str, Any] | None) -> Any:
    """Return the regular expression by which a byte-level pre-tokenizer splits a text; None for all others."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _BUILT_IN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None
