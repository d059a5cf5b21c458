"""Prices of a quote, of a file of quotes and of a month, against the paper's price list and numbers by hand."""

from datetime import date
from pathlib import Path

import pytest

from hlat.hardware import Instance, load_catalog, parse_quote, quotes_text, with_prices_of, with_quote, with_quotes
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


@pytest.mark.parametrize("text", ["on-demand", "2.10", "2.10/day", "/h", f"{'9' * 400}/h", None])
def test_other_texts_are_no_quotes(text: str | None) -> None:
    assert parse_quote(text) is None


def test_interruptions_replace_the_failures_of_every_instance() -> None:
    catalog = with_quote(load_catalog(), None, 0.25)
    assert {instance.failures.per_day for instance in catalog.instances} == {0.25}
    with pytest.raises(HardwareError, match="must be 0 or more"):
        with_quote(load_catalog(), None, -1.0)


HEADS = "cloud,region,instance,on-demand,reserved,spot,storage,egress,date,source"
TODAY = date(2026, 11, 28)


def quoted(folder: Path, rows: list[str], name: str = "p5.48xlarge", month: str | None = None) -> Instance:
    """The instance of that name with the quotes of some rows."""
    file = folder / "quotes.csv"
    file.write_text("\n".join([HEADS, *rows]) + "\n", encoding="utf-8")
    found = with_prices_of(with_quotes(load_catalog(), file, month, TODAY), month).instance(name)
    assert found is not None
    return found


def mistakes(folder: Path, rows: list[str]) -> list[str]:
    with pytest.raises(HardwareError) as caught:
        quoted(folder, rows)
    return str(caught.value).splitlines()[1:]


def test_a_quote_replaces_all_prices_of_its_instance_and_of_no_other(tmp_path: Path) -> None:
    rows = ["aws,us-east-1,P5.48xlarge,$50.5,,,0.02,0.09,2026-11-20,mail"]
    prices = quoted(tmp_path, rows).prices
    assert {kind: price.usd_per_hour for kind, price in prices.items()} == {"on-demand": 50.5}, "no capacity-block"
    one = prices["on-demand"]
    assert (one.storage, one.egress, one.origin) == (0.02, 0.09, "aws us-east-1, quoted 2026-11-20, mail")
    assert quoted(tmp_path, rows, "p4d.24xlarge") == load_catalog().instance("p4d.24xlarge")
    assert quoted(tmp_path, rows, month="2024-04").prices == {}, "98.32 USD in the catalog, which counts no more"


def test_the_newest_quote_of_a_place_counts_and_the_cheapest_place(tmp_path: Path) -> None:
    """By hand: us-east-1 asks 44 after 60 and 40, eu 43, seller b 35 reserved only. On 1 October us-east-1 asked 40."""
    rows = [
        "aws,us-east-1,p5.48xlarge,44,,,,,2026-11-20,",
        "AWS,us-east-1,p5.48xlarge,60,38,,,,2026-10-20,",
        "aws,us-east-1,p5.48xlarge,40,,,,,2026-09-30,",
        "aws,eu-north-1,p5.48xlarge,43,,,,,2026-11-01,",
        "b,,p5.48xlarge,,35,,,,2026-11-01,",
    ]
    prices = quoted(tmp_path, rows).prices
    assert {kind: price.usd_per_hour for kind, price in prices.items()} == {"on-demand": 43, "reserved": 35}
    assert prices["on-demand"].origin == "aws eu-north-1, quoted 2026-11-01, the cheapest of 2 places"
    then = quoted(tmp_path, rows, month="2026-10").prices
    assert {kind: price.usd_per_hour for kind, price in then.items()} == {"on-demand": 40}
    alone = quoted(tmp_path, rows[:3]).prices["on-demand"]
    assert (alone.usd_per_hour, alone.origin) == (44, "aws us-east-1, quoted 2026-11-20, the newest of 3 days")


def test_a_quote_of_more_than_180_days_says_its_age(tmp_path: Path) -> None:
    """1 June is 180 days before 28 November: 29 + 31 + 31 + 30 + 31 + 28."""
    origins = [
        quoted(tmp_path, [f"b,,p5.48xlarge,40,,,,,{day},"]).prices["on-demand"].origin
        for day in ("2026-06-01", "2026-05-31")
    ]
    assert origins == ["b, quoted 2026-06-01", "b, quoted 2026-05-31, 181 days ago"]


def test_a_quote_of_a_chip_counts_for_all_chips_of_the_instance(tmp_path: Path) -> None:
    rows = ["b,,p5.48xlarge,2.25/chip-h,18 USD,,,,2026-11-20,", "b,,trn2.48xlarge,,,1.5/h,,,2026-11-20,"]
    prices = quoted(tmp_path, rows).prices
    assert (prices["on-demand"].usd_per_hour, prices["reserved"].usd_per_hour) == (18, 18)
    assert quoted(tmp_path, rows, "trn2.48xlarge").prices["spot"].usd_per_hour == 24


def test_all_mistakes_are_named_with_their_lines(tmp_path: Path) -> None:
    rows = [
        "aws,us-east-1,p5.48xlage,50,,,,,2026-11-20,",
        "aws,us-east-1,p5.48xlarge,-3,,,,,2026-11-20,",
        "aws,us-east-1,p5.48xlarge,€40,0,nan,,,2026-11-20,",
        'aws,us-east-1,p5.48xlarge,"1,234.50",,,,,2026-11-20,',
        "aws,us-east-1,p5.48xlarge,1,234.50,,,,,2026-11-20,",
        "",
        "aws,us-east-1,p5.48xlarge,40,,,free,,20.11.2026,",
        ",us-east-1,,,,,,,2062-11-20,",
        f"aws,us-east-1,p5.48xlarge,{'9' * 400},,,,,2026-11-20,",
    ]
    found = mistakes(tmp_path, rows)
    starts = [
        "line 2: unknown instance 'p5.48xlage'; did you mean p5.48xlarge",
        "line 3: on-demand '-3': must be a positive number of US dollars",
        "line 4: on-demand '€40'",
        "line 4: reserved '0'",
        "line 4: spot 'nan'",
        "line 5: on-demand '1,234.50': must be a positive number of US dollars per instance and hour, without",
        "line 6: 11 cells under 10 columns",
        "line 8: date '20.11.2026': must be a day",
        "line 8: storage 'free'",
        "line 9: cloud is empty",
        "line 9: instance is empty",
        "line 9: date 2062-11-20: lies in the future",
        "line 9: it has no price",
        "line 10: on-demand '999",
    ]
    assert len(found) == len(starts)
    assert [line.strip()[: len(start)] for line, start in zip(found, starts, strict=True)] == starts


def test_mistakes_beyond_twenty_are_counted(tmp_path: Path) -> None:
    found = mistakes(tmp_path, ["aws,,p5.48xlarge,-1,,,,,2026-11-20,"] * 50)
    assert len(found) == 21 and found[-1].strip() == "and 30 more"


def test_two_prices_of_one_place_and_day_are_a_mistake_and_a_repeated_one_is_none(tmp_path: Path) -> None:
    row = "aws,us-east-1,p5.48xlarge,{},{},,,,2026-11-20,{}"
    found = mistakes(tmp_path, [row.format(40, "", "a"), row.format("", 30, "a"), row.format(41, "", "b")])
    assert [line.strip() for line in found] == [
        "lines 2 and 4: two on-demand prices of p5.48xlarge at aws us-east-1 on 2026-11-20; keep one"
    ]
    prices = quoted(tmp_path, [row.format(40, "", "a"), row.format("", 30, "a"), row.format(40, "", "b")]).prices
    assert {kind: price.usd_per_hour for kind, price in prices.items()} == {"on-demand": 40, "reserved": 30}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing 'cloud', 'instance', 'date'"),
        ("cloud;instance;spot;date\n", "separated by commas, are cloud"),
        ("cloud,instance,date\n", "no price: none of 'on-demand'"),
        ("cloud,instance,on-demnad,spot,date\n", "unknown 'on-demnad'"),
        ("cloud,instance,spot,spot,date\n", "more than once 'spot'"),
        ("Cloud, Instance ,On_Demand,Date\n\n,,,\n", "no row has a price"),
        (f'cloud,instance,spot,date\n"{"x" * 200_000}', "field larger than field limit"),
    ],
)
def test_a_table_of_other_columns_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "quotes.csv"
    file.write_text(text)
    with pytest.raises(HardwareError, match=says):
        with_quotes(load_catalog(), file)
    with pytest.raises(HardwareError, match=r"none\.csv: .*No such file"):
        with_quotes(load_catalog(), tmp_path / "none.csv")


@pytest.mark.parametrize("month", [None, "2023-08", "2024-04", "2025-05", "2025-06", "2026-07", "2026-11"])
def test_the_prices_of_the_catalog_as_quotes_are_the_same_prices(tmp_path: Path, month: str | None) -> None:
    """Today, and in every month: one table may stand for the other."""
    file = tmp_path / "quotes.csv"
    file.write_text(quotes_text(load_catalog()), encoding="utf-8")
    own, read = (
        {
            (instance.name, kind): price.usd_per_hour
            for instance in with_prices_of(catalog, month).instances
            for kind, price in instance.prices.items()
        }
        for catalog in (load_catalog(), with_quotes(load_catalog(), file, month))
    )
    assert own and own == read
