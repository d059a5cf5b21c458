"""Numbers for people: rounded, with thousands separators, and never with an exponent, which no unit goes with.

13,712.4, 3 digits -> "13,700"      0.0784, 3 digits -> "0.0784"      1.6e11 -> "160B"
"""

from math import floor, log10


def rounded_text(value: float, digits: int = 3) -> str:
    """Write a number rounded to significant digits; zeros at the end of a fraction are left out.

    Args:
        value: the number.
        digits: significant digits.
    """
    if value == 0:
        return "0"
    decimals = digits - 1 - floor(log10(abs(value)))
    rounded = round(value, decimals)
    text = f"{rounded:,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short_count(value: float) -> str:
    """Write a large number in three digits with its unit, as 1.2T, 300B or 350M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= 0.9995 * size:
            return f"{rounded_text(value / size)}{unit}"
    return f"{value:,.0f}"
