"""Prices in the place of the catalog's: a file of quotes, those of a month, or one quote for every machine.

    quotes.csv --with_quotes--> catalog with the quoted prices: the newest of each place, and of these the cheapest
    "2024-04" --with_prices_of--> catalog with the prices of then
    "2.10/h", interruptions --with_quote--> catalog with the price "own" and these failures for every instance
    catalog --quotes_text--> its own prices as a file of quotes

A file of quotes has a row for each seller, region, instance and day, and a column for each kind of price. It replaces
all prices of the instances that it names. Several days of one place are a history, of which a month takes its part.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import get_args

from hlat.config import short
from hlat.hardware.catalog import Catalog, FailureRate, Instance, InstancePrice, PriceKind
from hlat.hardware.cluster import Per, unknown_instance
from hlat.runtime.errors import HardwareError
from hlat.runtime.storage.local_files import read_small_file
from hlat.runtime.terminal import listed

OWN: PriceKind = "own"
"""Kind of the price of a quote."""

_QUOTE = re.compile(
    r"\$?\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:usd)?\s*/\s*(?:(chip|gpu|instance)[\s-]*)?h(?:our)?", re.IGNORECASE
)
_PRICE_UNITS: dict[str, Per] = {"": "chip", "chip": "chip", "gpu": "chip", "instance": "instance"}
GIVEN = "given by the user"
"""Source of figures that are options of a question."""


def parse_quote(text: str | None) -> tuple[float, Per] | None:
    """Read a price such as 2.10/h (of a chip) or 16.80/instance-h; None for other text. HardwareError for zero."""
    found = None if text is None else _QUOTE.fullmatch(text.strip())
    if found is None:
        return None
    usd = float(found[1])
    if not usd:
        raise HardwareError(f"--price {text}: must be a positive number of US dollars, as in 2.10/h")
    return usd, _PRICE_UNITS[(found[2] or "").lower()]


def with_prices_of(catalog: Catalog, month: str | None) -> Catalog:
    """Return a catalog with the prices of the first day of a month, as in 2024-04; None leaves them.

    Instances of which no price is known of then have none.

    Raises:
        HardwareError: not a month, or no price at all is known of it.
    """
    if month is None:
        return catalog
    day = _first_day(month)

    def change(instance: Instance) -> Instance:
        holding = {kind: price for kind, price in instance.prices.items() if (price.since or price.seen) <= day}
        former = {past.kind: past.price for past in instance.past_prices if past.since <= day < past.until}
        return instance.model_copy(update={"prices": holding | former})

    changed = catalog.with_instances(change)
    if not any(instance.prices for instance in changed.instances):
        days = [
            day
            for instance in catalog.instances
            for day in (
                *(price.since or price.seen for price in instance.prices.values()),
                *(price.since for price in instance.past_prices),
            )
        ]
        first = f"; the earliest are of {_first_month(min(days)):%Y-%m}" if days else ""
        raise HardwareError(f"--prices-of {month}: the catalog has no price of that month{first}")
    return changed


def _first_day(month: str) -> date:
    try:
        return datetime.strptime(month.strip(), "%Y-%m").replace(tzinfo=UTC).date()
    except ValueError as error:
        raise HardwareError(f"--prices-of {month}: must be a month, as in 2024-04") from error


def _first_month(day: date) -> date:
    # Prices are those of a month's first day. 31 days later is in the next month, whatever its length.
    return day if day.day == 1 else day.replace(day=1) + timedelta(days=31)


def with_quote(catalog: Catalog, quote: tuple[float, Per] | None, interruptions: float | None = None) -> Catalog:
    """Return a catalog whose instances all have the quoted price, of the kind ``own``, and a failure rate.

    ``interruptions`` are per instance and day; HardwareError if negative. None leaves prices or rates.
    """
    if interruptions is not None and interruptions < 0:
        raise HardwareError(f"--interruptions {interruptions:g}: must be 0 or more, per instance and day")

    def change(instance: Instance) -> Instance:
        update: dict[str, object] = {}
        if quote is not None:
            usd = quote[0] * (instance.chips if quote[1] == "chip" else 1)
            price = InstancePrice(usd_per_hour=usd, seen=datetime.now(UTC).date(), source=GIVEN)
            update["prices"] = {OWN: price}
        if interruptions is not None:
            update["failures"] = FailureRate(per_day=interruptions, source=GIVEN)
        return instance.model_copy(update=update)

    return catalog.with_instances(change)


_KINDS: tuple[PriceKind, ...] = get_args(PriceKind)
_COLUMNS = ("cloud", "region", "instance", *_KINDS, "storage", "egress", "date", "source")
_NEEDED = ("cloud", "instance", "date")
_PER_GB = re.compile(r"\$?\s*(\d{1,9}(?:\.\d{1,9})?)")
_DAY = timedelta(days=1)
_OLD = 180 * _DAY  # from then on, the plan says how old a quote is
_MOST_LISTED = 20  # mistakes in a message
_LONGEST_NAME = 60  # characters of a wrong name in a message


@dataclass(frozen=True)
class _Quote:
    """One price of a file of quotes."""

    instance: str  # its name in the catalog
    kind: PriceKind
    place: str  # seller and region
    price: InstancePrice
    line: int


def with_quotes(
    catalog: Catalog, file: str | Path | None, month: str | None = None, today: date | None = None
) -> Catalog:
    """Return a catalog in which a file of quotes has replaced all prices of the instances that it names.

    Of each place the newest quote counts, of a month's first day the newest until then; of several places the cheapest.

    Raises:
        HardwareError: the file cannot be read, or has mistakes; names all of them with their lines.
    """
    if file is None:
        return catalog
    now = today or datetime.now(UTC).date()
    by_instance: dict[str, list[_Quote]] = {}
    for quote in _read(Path(file), catalog, now):
        by_instance.setdefault(quote.instance, []).append(quote)
    day = date.max if month is None else _first_day(month)

    def change(instance: Instance) -> Instance:
        if (quotes := by_instance.get(instance.name)) is None:
            return instance
        return instance.model_copy(update={"prices": _prices_on(day, quotes, now), "past_prices": []})

    return catalog.with_instances(change)


def _prices_on(day: date, quotes: Sequence[_Quote], today: date) -> dict[PriceKind, InstancePrice]:
    """Choose the price of each kind on a day, and say what it was chosen from."""
    newest: dict[tuple[PriceKind, str], list[_Quote]] = {}
    for quote in sorted(quotes, key=lambda quote: quote.price.seen, reverse=True):
        if quote.price.seen <= day:
            newest.setdefault((quote.kind, quote.place.casefold()), []).append(quote)
    chosen: dict[PriceKind, InstancePrice] = {}
    for kind in _KINDS:
        places = [of_place for (of_kind, _), of_place in newest.items() if of_kind == kind]
        if places:
            best = min(places, key=lambda of_place: of_place[0].price.usd_per_hour)
            chosen[kind] = best[0].price.model_copy(update={"origin": _origin(best, len(places), today)})
    return chosen


def _origin(of_place: Sequence[_Quote], places: int, today: date) -> str:
    """Words for the newest quote of a place, the cheapest of so many places."""
    quote = of_place[0]
    words = [quote.place, f"quoted {quote.price.seen}"]
    if today - quote.price.seen > _OLD:
        words.append(f"{(today - quote.price.seen).days:,} days ago")
    if (days := len({other.price.seen for other in of_place})) > 1:
        words.append(f"the newest of {days} days")
    if places > 1:
        words.append(f"the cheapest of {places} places")
    return ", ".join([*words, quote.price.source] if quote.price.source else words)


def _read(file: Path, catalog: Catalog, today: date) -> list[_Quote]:
    try:
        rows = csv.reader(StringIO(read_small_file(file, kind="a file of quotes"), newline=""))
        heads = ["-".join(head.lower().replace("_", " ").split()) for head in next(rows, [])]
        quotes: list[_Quote] = []
        problems = list(_head_problems(heads))
        for cells in () if problems else filter(any, rows):
            found, wrong = _quotes_of(cells, heads, rows.line_num, catalog, today)
            quotes += found
            problems += [f"line {rows.line_num}: {one}" for one in wrong]
    except (OSError, ValueError, csv.Error) as error:
        raise HardwareError(f"--quotes {file}: {error}") from error
    problems += _contradictions(quotes)
    if not quotes and not problems:
        problems = ["no row has a price"]
    if problems:
        raise HardwareError(f"--quotes {file}:\n  " + listed(problems, _MOST_LISTED, "\n  "))
    return quotes


def _head_problems(heads: Sequence[str]) -> Iterator[str]:
    wrong = {
        "unknown": [head for head in heads if head not in _COLUMNS],
        "missing": [name for name in _NEEDED if name not in heads],
        "more than once": sorted({head for head in heads if heads.count(head) > 1}),
        "no price: none of": [] if set(heads) & set(_KINDS) else _KINDS,
    }
    said = [f"{what} {', '.join(map(short, names[:_MOST_LISTED]))}" for what, names in wrong.items() if names]
    if said:
        yield f"line 1: columns, separated by commas, are {', '.join(_COLUMNS)}; {'; '.join(said)}"


def _quotes_of(
    cells: Sequence[str], heads: Sequence[str], line: int, catalog: Catalog, today: date
) -> tuple[list[_Quote], list[str]]:
    """Return the prices of a row, or what is wrong with it."""
    if len(cells) != len(heads):
        says = f"{len(cells)} cells under {len(heads)} columns; numbers have no commas, and texts with commas quotes"
        return [], [says]
    row = dict.fromkeys(_COLUMNS, "") | dict(zip(heads, (" ".join(cell.split()) for cell in cells), strict=True))
    problems = [f"{name} is empty" for name in _NEEDED if not row[name]]
    instance, day = catalog.instance(row["instance"]), _day(row["date"], today)
    if instance is None and row["instance"]:
        problems.append(unknown_instance(row["instance"][:_LONGEST_NAME], catalog))
    if isinstance(day, str) and row["date"]:
        problems.append(day)
    kinds = [kind for kind in _KINDS if row[kind]]
    if not kinds:
        problems.append("it has no price")
    amounts = {kind: _per_hour(row[kind], instance) for kind in kinds}
    per_gb = {name: _per_gb(row[name]) for name in ("storage", "egress")}
    wrong = {name: said for name, said in (amounts | per_gb).items() if isinstance(said, str)}
    problems += [f"{name} {short(row[name])}: {said}" for name, said in wrong.items()]
    if problems or instance is None:
        return [], problems
    place = " ".join(filter(None, (row["cloud"], row["region"])))
    common = {"seen": day, "source": row["source"], **per_gb}
    prices = {kind: InstancePrice(usd_per_hour=amounts[kind], **common) for kind in kinds}
    return [_Quote(instance.name, kind, place, price, line) for kind, price in prices.items()], []


def _day(text: str, today: date) -> date | str:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return f"date {short(text)}: must be a day, as in {today}"
    # Where the seller is, it may be tomorrow.
    return day if day <= today + _DAY else f"date {text}: lies in the future"


def _per_hour(text: str, instance: Instance | None) -> float | str:
    """Read USD per instance and hour, with --price's words for other units."""
    says = (
        "must be a positive number of US dollars per instance and hour, without separators of thousands, as in "
        "1234.50; of a chip: 2.10/chip-h"
    )
    try:
        quote = parse_quote(text if "/" in text else f"{text}/instance-h")
    except HardwareError:  # zero
        return says
    return says if quote is None else quote[0] * (instance.chips if instance and quote[1] == "chip" else 1)


def _per_gb(text: str) -> float | str | None:
    found = _PER_GB.fullmatch(text)
    return (float(found[1]) if found else "must be US dollars per GB, 0 or more, as in 0.023") if text else None


def _contradictions(quotes: Sequence[_Quote]) -> Iterator[str]:
    """Name prices of one instance, kind, place and day that differ."""
    seen: dict[tuple[str, PriceKind, str, date], _Quote] = {}
    for quote in quotes:
        first = seen.setdefault((quote.instance, quote.kind, quote.place.casefold(), quote.price.seen), quote)
        one, other = ((each.price.usd_per_hour, each.price.storage, each.price.egress) for each in (first, quote))
        if one != other:
            yield (
                f"lines {first.line} and {quote.line}: two {quote.kind} prices of {quote.instance} at {quote.place} on "
                f"{quote.price.seen}; keep one"
            )


def quotes_text(catalog: Catalog) -> str:
    """Write the prices of a catalog as a file of quotes; the seller is the word catalog."""
    rows: dict[tuple[str, date, str], dict[str, float | None]] = {}
    for instance in catalog.instances:
        dated = [(past.kind, past.since, past.price) for past in instance.past_prices]
        # A price that is known to hold for longer begins a history.
        dated += [
            (kind, day, one) for kind, one in instance.prices.items() for day in {one.since or one.seen, one.seen}
        ]
        for kind, day, one in sorted(dated, key=lambda each: each[1]):
            row = rows.setdefault((instance.name, day, one.source), {"storage": one.storage, "egress": one.egress})
            row[kind] = one.usd_per_hour
    text = StringIO()
    table = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    table.writeheader()
    for (name, day, source), prices in rows.items():
        words = catalog.sources.get(source, source)
        table.writerow({"cloud": "catalog", "instance": name, "date": day, "source": words, **prices})
    return text.getvalue()
