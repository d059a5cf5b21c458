"""Spellings: characters, words and texts that mean the same.

"8 × 400 Gb/s – InfiniBand" -> "8 x 400 Gb/s - InfiniBand"
"""

import re
import unicodedata

from published_runs.reader.reading import UnreadableError

_DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-")
_CROSSES = dict.fromkeys(map(ord, "×✕✖⨯"), "x")
_UNSTATED = re.compile(
    r"(?:|-+|\?+|n/?a|none stated|unknown|tbd|(?:.* )?not (?:stated|published|given|known|specified))"
)


def plain(text: str | None) -> str:
    """The text with plain dashes, crosses and single spaces; case is kept, since Gb and GB differ."""
    folded = unicodedata.normalize("NFKC", text or "").translate(_DASHES | _CROSSES)
    return " ".join(folded.split())


def lower(text: str | None) -> str:
    """The plain text in lower case."""
    return plain(text).lower()


def is_unstated(text: str | None) -> bool:
    """True for an empty text and for words that say that the source gives no value."""
    return _UNSTATED.fullmatch(lower(text)) is not None


def has_word(pattern: str, text: str) -> bool:
    """True if a pattern occurs in a lower-case text, not as a part of a longer word."""
    return re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", text) is not None


_MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"[~≈]?\s*(\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)\s*([kmgbt]?)i?")
_POWER = re.compile(r"(\d+)\s*(?:\^|\*\*)\s*(\d+)")
_GROUPED = re.compile(r"\d{1,3}(?:[,_]\d{3})+(?:\.\d+)?")


def parse_number(text: str, kilo: float = 1e3) -> float:
    """Parse a positive or zero number: 4,096, 4096.0, 1.5k, 2M, 2^20, 1e6.

    Args:
        text: the number, with nothing else.
        kilo: value of ``k``; 1024 for sequence lengths.

    Raises:
        UnreadableError: it is no number, a range, negative, or not finite.
    """
    folded = lower(text)
    power = _POWER.fullmatch(folded)
    if power is not None and int(power[2]) <= 64 and int(power[1]) <= 16:
        return float(int(power[1]) ** int(power[2]))
    match = _NUMBER.fullmatch(folded)
    if match is None:
        raise UnreadableError(f"not one number: {text!r}")
    digits = match[1]
    if ("," in digits or "_" in digits) and not _GROUPED.fullmatch(digits):
        raise UnreadableError(f"separators that do not group thousands: {text!r}")
    value = float(digits.replace(",", "").replace("_", "")) * {**_MULTIPLES, "k": kilo}[match[2]]
    if not value < 1e18:
        raise UnreadableError(f"not a plausible number: {text!r}")
    return value


def parse_count(text: str, kilo: float = 1e3) -> int:
    """Parse a whole number.

    Raises:
        UnreadableError: it is no number, or has a fraction.
    """
    value = parse_number(text, kilo)
    if value != int(value):
        raise UnreadableError(f"not a whole number: {text!r}")
    return int(value)
