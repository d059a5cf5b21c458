"""Numbers as people read them: rounded as Python rounds, without an exponent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.runtime.quantities import rounded_text, short_count


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
