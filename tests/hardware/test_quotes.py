"""Prices of a quote and of a month, against the catalog's file and the price list that the HLAT paper names."""

import pytest

from hlat.hardware import load_catalog, parse_quote, with_prices_of, with_quote
from hlat.runtime.errors import HardwareError


def price(month: str | None, name: str, kind: str = "on-demand") -> float | None:
    found = with_prices_of(load_catalog(), month).instance(name).prices.get(kind)
    return None if found is None else found.usd_per_hour


def test_the_earliest_month_that_is_named_has_a_price_and_the_one_before_has_none() -> None:
    with pytest.raises(HardwareError, match=r"the earliest are of \d{4}-\d{2}") as caught:
        with_prices_of(load_catalog(), "2010-01")
    year, month = map(int, str(caught.value)[-7:].split("-"))
    assert with_prices_of(load_catalog(), f"{year}-{month:02}")
    with pytest.raises(HardwareError):
        with_prices_of(load_catalog(), f"{year - (month == 1)}-{month - 1 or 12:02}")


def test_the_prices_of_the_papers_cost_comparison() -> None:
    """HLAT (2024), cost per 4 million tokens: 21.50 USD an hour for trn1.32xlarge, 32.77 for p4d.24xlarge."""
    assert (price("2024-04", "trn1.32xlarge"), price("2024-04", "p4d.24xlarge")) == (21.50, 32.77)


def test_a_price_holds_from_its_first_day_to_the_day_before_its_last() -> None:
    assert [price(month, "p4d.24xlarge") for month in ("2025-05", "2025-06", "2026-11")] == [32.77, 21.9576, 21.9576]
    assert price("2023-08", "p5.48xlarge") == 98.32
    assert price("2023-08", "p4d.24xlarge") is None, "seen later, nothing known before"
    assert price("2025-06", "p4d.24xlarge", "capacity-block") is None


def test_without_a_month_the_prices_are_those_of_the_catalog() -> None:
    assert with_prices_of(load_catalog(), None) is load_catalog()


@pytest.mark.parametrize(
    ("month", "says"),
    [("2024", "must be a month"), ("April", "must be a month"), ("2023-07", "no price of that month")],
)
def test_other_texts_and_months_without_prices_are_refused(month: str, says: str) -> None:
    with pytest.raises(HardwareError, match=says):
        with_prices_of(load_catalog(), month)


@pytest.mark.parametrize(
    ("text", "usd", "per"),
    [
        ("2.10/h", 2.1, "chip"),
        ("$2.10 / hour", 2.1, "chip"),
        ("2 USD/gpu-h", 2.0, "chip"),
        ("2/chip h", 2.0, "chip"),
        ("98/instance-h", 98.0, "instance"),
    ],
)
def test_quotes_are_read_in_the_spellings_that_sellers_use(text: str, usd: float, per: str) -> None:
    assert parse_quote(text) == (usd, per)
    found = with_quote(load_catalog(), parse_quote(text)).instance("p5.48xlarge").prices["own"]
    assert found.usd_per_hour == usd * (8 if per == "chip" else 1)


@pytest.mark.parametrize("text", ["on-demand", "2.10", "2.10/day", "/h", None])
def test_other_texts_are_no_quotes(text: str | None) -> None:
    assert parse_quote(text) is None


def test_interruptions_replace_the_failures_of_every_instance() -> None:
    catalog = with_quote(load_catalog(), None, 0.25)
    assert {instance.failures.per_day for instance in catalog.instances} == {0.25}
    with pytest.raises(HardwareError, match="must be 0 or more"):
        with_quote(load_catalog(), None, -1.0)
