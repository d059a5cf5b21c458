"""Numbers as people read them: rounded as Python rounds, without an exponent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.runtime.quantities import amount_text, rounded_text, short_count, usd_text


@given(value=st.floats(1e-6, 1e15), digits=st.integers(1, 5))
def test_a_rounded_number_is_pythons_without_an_exponent(value: float, digits: int) -> None:
    text = rounded_text(value, digits)
    assert "e" not in text and not text.endswith(".")
    assert float(text.replace(",", "")) == pytest.approx(float(f"{value:.{digits}g}"), rel=1e-12)


def test_units_and_separators() -> None:
    assert [rounded_text(value) for value in (0, 13_712.4, 999.6, 0.0784, 35_600)] == [
        *("0", "13,700", "1,000", "0.0784", "35,600")
    ]
    assert [short_count(value) for value in (1.6e11, 15e12, 350e6, 999.6e6, 12)] == ["160B", "15T", "350M", "1B", "12"]


def test_amounts_and_money_have_the_prefix_of_their_size() -> None:
    amounts = ((3.56e10, "Wh"), (4.9e12, "B"), (96.4e9, "B"), (2e9, "B/s"), (850, "Wh"), (999_960, "Wh"))
    assert [amount_text(*one) for one in amounts] == [*("35.6 GWh", "4.9 TB", "96.4 GB", "2 GB/s", "850 Wh", "1 MWh")]
    assert [usd_text(value) for value in (141_300, 868.2, 9_994, 9_996, 1.234e6, 2.6e9)] == [
        *("$141k", "$868", "$9,990", "$10k", "$1.23M", "$2.6B")
    ]


@given(value=st.floats(1e-3, 1e17))
def test_no_amount_has_an_exponent_and_each_is_read_back(value: float) -> None:
    number, unit = amount_text(value, "B").split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}[unit]
    assert float(number.replace(",", "")) * factor == pytest.approx(value, rel=6e-3)
