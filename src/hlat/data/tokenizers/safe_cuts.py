r"""Where a long text may be cut without changing its tokens.

A byte-level BPE tokenizer first splits the text with a regular expression; merges never cross the splits. A cut is
therefore invisible if the expression, matched on the two parts alone, makes the same matches as on the whole. The
cut taken here is before one space or line break that stands between two ASCII letters, ``a|_b``. For the expressions
listed below this is proven so:

1. No alternative can match an ASCII letter followed by white space, so in the whole text a match ends at the cut.
2. Left part: whatever ends with the letter before the cut is a greedy run of letters (or a contraction) that ends
   at a non-letter; the end of the text is one as well. The only look-aheads are ``\s+(?!\S)``, which is about white
   space and so never tried at that letter, and "no letter follows", true of the cut and of the end of text alike.
3. Right part: it starts with exactly one white-space character and a letter, no expression looks behind, and so
   the matches from the cut on depend only on what follows it.

The tests check the same on random texts for every listed expression. For any other tokenizer texts stay whole.
"""

import re
from collections.abc import Iterator
from typing import Any

# The expression of our own tokenizers: contractions, words with their combining marks and the space before them,
# digits one by one (a number of any length has one segmentation), punctuation with the line ends after it, line
# ends with the white space before them, other white space.
OWN_PATTERN = (
    r"'(?i:s|t|d|m|ll|re|ve)(?!\p{L})"
    r"| ?\p{L}[\p{L}\p{M}]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
# Published expressions: Llama 3 (digits by three) and Qwen 2 (digits one by one), as their tokenizer.json has them.
_PUBLISHED = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
]
_PROVEN = frozenset([OWN_PATTERN, *_PUBLISHED])

_CUT = re.compile(r"(?<=[A-Za-z])[ \n](?=[A-Za-z])")


def cut_text(text: str, min_chars: int) -> Iterator[str]:
    """Pieces of a text of at least so many characters (one or more), cut before white space between ASCII letters.

    Text without such places stays whole, so a piece may be longer; the last one may be shorter.
    """
    start = 0
    while len(text) - start > min_chars:
        place = _CUT.search(text, start + min_chars)
        if place is None:
            break
        yield text[start : place.start()]
        start = place.start()
    yield text[start:] if start else text


def cuts_preserve_tokens(description: dict[str, Any]) -> bool:
    """Whether the tokenizer of a parsed tokenizer.json gives the same tokens for the pieces as for the whole text."""
    model = description.get("model") or {}
    return (
        description.get("normalizer") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(token["special"] for token in description.get("added_tokens", []))
        and _splits_as_proven(description.get("pre_tokenizer"))
    )


def _splits_as_proven(pre_tokenizer: dict[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True  # GPT-2's expression, built into the library
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _PROVEN
    return False
