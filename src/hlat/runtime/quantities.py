"""Numbers as people type and read them: counts, durations, sizes and shares with a unit.

    "100M" --parse_whole--> 100_000_000        "3h" --parse_seconds--> 10_800.0
    "20GB" --parse_bytes--> 20_000_000_000     "80%" --parse_share--> 0.8
    13,712.4 --rounded_text, 3 digits--> "13,700"      1.6e11 --short_count--> "160B"
    3.56e10, "Wh" --amount_text--> "35.6 GWh"          141,300 --usd_text--> "$141k"

A text without a number and a unit is nobody's: the functions return None, and the caller says what it expected. A text
with two meanings is refused, and the message names both. A number is never written with an exponent, which no unit goes
with.
"""

import re
from decimal import Decimal
from math import floor, log10

_NUMBER = re.compile(r"\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)\s*([A-Za-z%]*)\s*")
_LONGEST = 60  # characters of a text that is parsed
_DECIMAL = {"k": 3, "K": 3, "M": 6, "b": 9, "B": 9, "g": 9, "G": 9, "t": 12, "T": 12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}B": factor for prefix, factor in _BINARY.items()
}
_SECONDS = {
    **dict.fromkeys(("ms", "msec"), Decimal("0.001")),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), Decimal(1)),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), Decimal(60)),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), Decimal(3600)),
    **dict.fromkeys(("d", "day", "days"), Decimal(86400)),
    **dict.fromkeys(("w", "week", "weeks"), Decimal(604800)),
}
_DURATION = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*[A-Za-z]+)+\s*")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class QuantityError(ValueError):
    """Number with a unit that has two meanings, or none here; the message is a clause with a remedy."""


def _split(text: str) -> tuple[Decimal, str] | None:
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None or not found[1].lstrip("+-.")[:1].isdigit():  # an exponent alone, as e2, is no number
        return None
    return Decimal(found[1].replace(",", "").replace("_", "")), found[2]


def _whole(text: str, value: Decimal) -> int:
    if value != value.to_integral_value():
        raise QuantityError(f"{text.strip()} is {value:,f}, which is no whole number")
    return int(value)


def parse_whole(text: str) -> int | None:
    """Parse a whole number: 100M, 1.5B, 1e9, 10_000, 10,000, 64Ki; None if it is none with a unit of counts.

    Raises:
        QuantityError: it is not whole, or ``m``, which may mean millions or minutes.
    """
    parts = _split(text)
    if parts is None:
        return None
    number, unit = parts
    if unit == "m":
        raise QuantityError(f"{text.strip()} may mean millions or minutes; write {number}M, or the whole number")
    if unit == "%":
        raise QuantityError(f"{text.strip()} is a share, and a number is expected")
    if unit in _SECONDS:
        raise QuantityError(f"{text.strip()} is a duration, and a number is expected")
    if unit in _BINARY:
        return _whole(text, number * _BINARY[unit])
    return _whole(text, number.scaleb(_DECIMAL.get(unit, 0))) if unit in ("", *_DECIMAL) else None


def parse_length(text: str) -> int | None:
    """Parse a length that is often a power of two: 4096, 4Ki; for 4K, 1,000 or 1,024 each, QuantityError."""
    parts = _split(text)
    if parts is not None and parts[1] in ("k", "K"):
        decimal, binary = parts[0] * 1000, parts[0] * 1024
        raise QuantityError(f"{text.strip()} may mean {decimal:,f} or {binary:,f}; write {decimal:f} or {parts[0]}Ki")
    return parse_whole(text)


def parse_bytes(text: str) -> int | None:
    """Parse a number of bytes: 100MB, 95MiB, 100M, 1e8; QuantityError as ``parse_whole``."""
    parts = _split(text)
    if parts is not None and parts[1] in _SIZES and parts[1] != "B":
        return _whole(text, parts[0] * _SIZES[parts[1]])
    if parts is not None and parts[1] == "B":
        raise QuantityError(f"{text.strip()} may mean bytes or billions; write {parts[0]}GB, or the whole number")
    return parse_whole(text)


def parse_gibibytes(text: str) -> float | None:
    """Return a size in GiB: 20GiB, 20GB, 512MiB, and 20 for 20 GiB; QuantityError for G, which may be GB or GiB."""
    parts = _split(text)
    if parts is None:
        return None
    number, unit = parts
    if unit in _DECIMAL or unit in _BINARY or unit == "m":
        prefix = unit[0].upper()
        raise QuantityError(f"{text.strip()} may mean {number}{prefix}B or {number}{prefix}iB; write one of them")
    if unit in _SIZES:
        return float(number * _SIZES[unit] / 2**30)
    return float(number) if unit == "" else None


def parse_seconds(text: str) -> float | None:
    """Return a duration in seconds: 90, 90s, 15min, 3h, 1h30min, 2d, 1w, 500ms.

    Raises:
        QuantityError: ``m``, which may mean minutes or months, or millions.
    """
    plain = _split(text)
    if plain is not None and plain[1] == "":
        return float(plain[0])
    if len(text) > _LONGEST or _DURATION.fullmatch(text) is None:
        return None
    total = Decimal(0)
    for number, unit in _DURATION_PART.findall(text):
        if unit in ("m", "M"):
            raise QuantityError(f"{text.strip()}: {unit} may mean minutes, months or millions; write {number}min")
        if unit not in _SECONDS:
            return None
        total += Decimal(number) * _SECONDS[unit]
    return float(total)


def parse_share(text: str) -> float | None:
    """Parse a share such as 80%, or 0.8; None if the text is none."""
    parts = _split(text)
    if parts is None or parts[1] not in ("", "%"):
        return None
    return float(parts[0] / 100 if parts[1] else parts[0])


def rounded_text(value: float, digits: int = 3) -> str:
    """Write a number rounded to significant digits; zeros at the end of a fraction are left out."""
    if value == 0:
        return "0"
    decimals = digits - 1 - floor(log10(abs(value)))
    rounded = round(value, decimals)
    text = f"{rounded:,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short_count(value: float) -> str:
    """Write a large number in three digits with its unit, as 1.2T, 300B or 350M."""
    return _with_prefix(value, "MBT", 3) if value >= _LEAST * 1e6 else f"{value:,.0f}"


def amount_text(value: float, unit: str, digits: int = 3) -> str:
    """Write an amount with the prefix of its unit, as 35.6 GWh or 4.9 TB."""
    text = _with_prefix(value, "kMGTP", digits)
    return f"{text} {unit}" if text[-1].isdigit() else f"{text[:-1]} {text[-1]}{unit}"


def usd_text(value: float, digits: int = 3) -> str:
    """Write an amount of money, as $868, $141k or $1.2M; below ten thousand without a letter."""
    return "$" + (rounded_text(value, digits) if value < _LEAST * 1e4 else _with_prefix(value, "kMBT", digits))


_EXPONENTS = {"k": 3, "M": 6, "B": 9, "G": 9, "T": 12, "P": 15}
_LEAST = 0.9995  # of a unit, which in three digits are 1


def _with_prefix(value: float, prefixes: str, digits: int) -> str:
    """Write a number in units of the largest of some prefixes of which there is at least one."""
    for prefix in reversed(prefixes):
        if value >= _LEAST * 10 ** _EXPONENTS[prefix]:
            return rounded_text(value / 10 ** _EXPONENTS[prefix], digits) + prefix
    return rounded_text(value, digits)
