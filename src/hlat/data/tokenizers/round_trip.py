"""Measure how much of a text is lost between its tokens and the text that they decode to.

    sample --encode, decode--> the same text, or: share of its bytes that are lost, share of unknown tokens, an example

A byte-level tokenizer loses nothing. Others lower-case, strip accents, join spaces, or drop what they do not know.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

import tokenizers

from hlat.data.tokenizers.base import Tokenizer
from hlat.runtime.errors import DataError

_PIECES, _CHARS = 48, 300  # comparing two texts takes time that grows with the square of their length
_CONTEXT = 12  # characters of an example around the first difference


class RoundTripLoss(NamedTuple):
    """Loss of a sample.

    Attributes:
        lost: share of its bytes that do not come back.
        unknown: share of its tokens that stand for unknown text.
        differing: share of its pieces that the library which made the tokenizer gives other ids.
        example: (text, text that comes back), shortened; empty if nothing is lost.
    """

    lost: float
    unknown: float
    differing: float
    example: tuple[str, str]


@dataclass
class _Sums:
    bytes: int = 0
    kept: int = 0
    tokens: int = 0
    unknown: int = 0
    pieces: int = 0
    differing: int = 0


def check_export(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Check that an export gives texts the ids of training: its tokenizer.json, by the library that reads it.

    Raises:
        DataError: the tokenizer cannot be exported, or with other ids.
    """
    if tokenizer.not_exported:
        raise DataError(tokenizer.not_exported)
    exported = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    exported.no_truncation()
    exported.no_padding()
    exported.encode_special_tokens = True
    for piece in _pieces(texts):
        try:
            ids = tokenizer.encode(piece)
        except DataError:  # of a text that has no ids, there are none to compare
            continue
        if exported.encode(piece, add_special_tokens=False).ids != ids:
            raise DataError(
                f"an exported model would read {piece[:40]!r} as other ids than in training. Report this with the "
                "tokenizer, and give a tokenizer.json, or data.tokenizer.path=null to train one."
            )


def measure_loss(tokenizer: Tokenizer, texts: Sequence[str]) -> RoundTripLoss:
    """Encode and decode a sample of texts, and compare.

    Raises:
        DataError: the tokenizer cannot encode a text.
    """
    sums, example = _Sums(), ("", "")
    for piece in _pieces(texts):
        ids = tokenizer.encode(piece)
        back = tokenizer.decode(ids)
        size = len(piece.encode())
        sums.bytes += size
        sums.pieces += 1
        sums.differing += tokenizer.encode_by_origin(piece) != ids
        sums.tokens += len(ids)
        sums.unknown += 0 if tokenizer.unknown_id is None else ids.count(tokenizer.unknown_id)
        if back == piece:
            sums.kept += size
            continue
        blocks = SequenceMatcher(None, piece, back, autojunk=False).get_matching_blocks()
        kept = sum(len(piece[block.a : block.a + block.size].encode()) for block in blocks)
        sums.kept += kept
        if not example[0] and kept < size:
            example = _around_difference(piece, back)
    lost = 1 - sums.kept / sums.bytes if sums.bytes else 0.0
    return RoundTripLoss(lost, sums.unknown / max(sums.tokens, 1), sums.differing / max(sums.pieces, 1), example)


def vocabulary_texts(tokenizer: Tokenizer) -> list[str]:
    """Return what evenly spread tokens of the vocabulary spell, to check an export where there is no corpus."""
    step = -(-tokenizer.vocab_size // _PIECES)
    ends = [(start, min(start + 16, tokenizer.vocab_size)) for start in range(0, tokenizer.vocab_size, step)]
    return [tokenizer.decode(range(start, end)) for start, end in ends]


def describe_tokenizer(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[str, str] | None:
    """Return what a user should know of a tokenizer before training, and what would work; None for nothing.

    Args:
        tokenizer: the tokenizer that the recipe gives.
        texts: a sample of the corpus.

    Raises:
        DataError: see ``measure_loss`` and ``check_export``.
    """
    check_export(tokenizer, texts)
    loss, said, remedy = measure_loss(tokenizer, texts), list[str](), ""
    if tokenizer.left_out:
        verb = "is" if len(tokenizer.left_out) == 1 else "are"
        said.append(f"{' and '.join(tokenizer.left_out)} {verb} not used")
    if loss.differing:
        said.append(
            f"{_share(loss.differing)} of the sample's pieces get other ids from the library of this tokenizer; in "
            "training and in an export they get those of its tokenizer.json"
        )
    if loss.lost:
        before, after = loss.example
        unknown = f", {_share(loss.unknown)} of its tokens are unknown text" if loss.unknown else ""
        said.append(
            f"{_share(loss.lost)} of the text is lost in its tokens, as in {before!r}, which comes back as {after!r}"
            f"{unknown} (measured on a sample)"
        )
        remedy = "A byte-level tokenizer with all 256 bytes loses nothing; data.tokenizer.path=null trains one."
    return (f"data.tokenizer.path: {'; '.join(said)}.", remedy) if said else None


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _pieces(texts: Sequence[str]) -> Iterator[str]:
    """Yield pieces of the texts: the beginning, the middle and the end of each, of evenly spread ones."""
    pieces = []
    for text in texts:
        starts = sorted({0, max(0, len(text) // 2 - _CHARS // 2), max(0, len(text) - _CHARS)})
        pieces += [text[start : start + _CHARS].encode(errors="ignore").decode() for start in starts]
    yield from pieces[:: max(1, -(-len(pieces) // _PIECES))]


def _around_difference(text: str, back: str) -> tuple[str, str]:
    """Cut a text and what comes back to where they first differ."""
    same = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    start = max(0, same - _CONTEXT)
    return text[start : same + 2 * _CONTEXT], back[start : same + 2 * _CONTEXT]
