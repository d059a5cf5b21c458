"""Types of the numbers in recipes: each reads what people type, such as 100M, 3h, 20GB and 80%.

    field: Positive, Seconds, Gibibytes, ... --> a number, or a text with a unit (``hlat.runtime.quantities``)

A field gets its notation from its type and from nothing else. A text that has not the form of a number is left to
pydantic, whose error says what the field takes.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hlat.runtime.quantities.parsing import (
    QuantityError,
    parse_bytes,
    parse_gibibytes,
    parse_length,
    parse_seconds,
    parse_share,
    parse_whole,
)


def _reading(parse: Callable[[str], float | None], number: type) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = parse(value)
        except QuantityError as error:
            raise PydanticCustomError("quantity", "{reason}", {"reason": str(error)}) from None
        return value if found is None else found

    return BeforeValidator(read, json_schema_input_type=number | str)


Whole = Annotated[int, _reading(parse_whole, int)]
"""A whole number: 100M, 1.5B, 1e9, 10_000."""
Positive = Annotated[Whole, Field(gt=0)]
Count = Annotated[Whole, Field(ge=0)]
Length = Annotated[int, _reading(parse_length, int)]
"""A whole number that is often a power of two: 4096 or 4Ki, and not 4K, which may mean 4,000."""
PositiveLength = Annotated[Length, Field(gt=0)]
Bytes = Annotated[int, _reading(parse_bytes, int), Field(gt=0)]
"""A size in bytes: 100MB, 95MiB."""
Amount = Annotated[float, _reading(parse_whole, float)]
"""A number that may be large and need not be whole, such as tokens: 300B."""
Gibibytes = Annotated[float, _reading(parse_gibibytes, float), Field(gt=0)]
"""A size in GiB: 20, 20GiB, 20GB."""
Duration = Annotated[float, _reading(parse_seconds, float)]
"""A duration in seconds: 90, 15min, 3h."""
Seconds = Annotated[Duration, Field(gt=0)]
Share = Annotated[float, _reading(parse_share, float)]
"""A share: 0.8 or 80%."""
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Choice = Annotated[
    Literal[True, False, "auto"],
    BeforeValidator(lambda value: _WORDS.get(value.lower(), value) if isinstance(value, str) else value),
]
"""true, false (quoted or not, as for every switch), or auto."""
