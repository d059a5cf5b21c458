"""Prices and failures other than today's of the catalog: a quote per chip, spot interruptions, prices of a month.

"2.10/h", interruptions --with_quote--> catalog with the price "own" and these failures for every instance
"2024-04" --with_prices_of--> catalog with the prices of then
"""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from hlat.hardware.catalog import Catalog, FailureRate, Instance, InstancePrice, PriceKind
from hlat.runtime.errors import HardwareError

Per = Literal["chip", "instance"]
"""Unit of a number of machines, or of a price."""

OWN: PriceKind = "own"
"""Kind of the price of a quote."""

_QUOTE = re.compile(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:usd)?\s*/\s*(?:(chip|gpu|instance)[\s-]*)?h(?:our)?", re.IGNORECASE)
_UNITS: dict[str, Per] = {"": "chip", "chip": "chip", "gpu": "chip", "instance": "instance"}
_SOURCE = "given by the user"


def parse_quote(text: str | None) -> tuple[float, Per] | None:
    """Read a price such as 2.10/h (of a chip), 2.10/chip-h or 16.80/instance-h; None for any other text.

    Raises:
        HardwareError: a price of zero.
    """
    found = None if text is None else _QUOTE.fullmatch(text.strip())
    if found is None:
        return None
    usd = float(found[1])
    if not usd:
        raise HardwareError(f"--price {text}: must be a positive number of US dollars, as in 2.10/h")
    return usd, _UNITS[(found[2] or "").lower()]


def with_prices_of(catalog: Catalog, month: str | None) -> Catalog:
    """Return a catalog with the prices of the first day of a month; instances of which none is known have none.

    Args:
        catalog: chips and instances.
        month: as in 2024-04; None leaves the prices.

    Raises:
        HardwareError: not a month, or no price at all is known of it.
    """
    if month is None:
        return catalog
    try:
        day = datetime.strptime(month.strip(), "%Y-%m").replace(tzinfo=UTC).date()
    except ValueError as error:
        raise HardwareError(f"--prices-of {month}: must be a month, as in 2024-04") from error

    def change(instance: Instance) -> Instance:
        holding = {kind: price for kind, price in instance.prices.items() if (price.since or price.seen) <= day}
        former = {
            price.kind: InstancePrice(usd_per_hour=price.usd_per_hour, seen=price.since, source=price.source)
            for price in instance.past_prices
            if price.since <= day < price.until
        }
        return instance.model_copy(update={"prices": holding | former})

    instances = [change(instance) for instance in catalog.instances]
    if not any(instance.prices for instance in instances):
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
    return catalog.model_copy(update={"instances": instances})


def _first_month(day: date) -> date:
    """Return a day of the first month that begins on a day or after it: prices are those of a month's first day."""
    return day if day.day == 1 else day.replace(day=1) + timedelta(days=31)


def with_quote(catalog: Catalog, quote: tuple[float, Per] | None, interruptions: float | None = None) -> Catalog:
    """Return a catalog whose instances all have the quoted price, of the kind ``own``, and a failure rate.

    Args:
        catalog: chips and instances.
        quote: USD per hour, and of what; None leaves the prices.
        interruptions: per instance and day; None leaves the failure rates.

    Raises:
        HardwareError: negative interruptions.
    """
    if interruptions is not None and interruptions < 0:
        raise HardwareError(f"--interruptions {interruptions:g}: must be 0 or more, per instance and day")

    def change(instance: Instance) -> Instance:
        update: dict[str, object] = {}
        if quote is not None:
            usd = quote[0] * (instance.chips if quote[1] == "chip" else 1)
            price = InstancePrice(usd_per_hour=usd, seen=datetime.now(UTC).date(), source=_SOURCE)
            update["prices"] = {OWN: price}
        if interruptions is not None:
            update["failures"] = FailureRate(per_day=interruptions, source=_SOURCE)
        return instance.model_copy(update=update)

    return catalog.model_copy(update={"instances": [change(instance) for instance in catalog.instances]})
