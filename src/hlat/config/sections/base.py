"""Base class of the sections of a recipe, the marks of their fields, and the types of their numbers.

    field: Positive, Seconds, Gibibytes, ... --> a number, or a text with a unit (``hlat.runtime.quantities``)

A number reads what people type, such as 100M, 3h, 20GB and 80%. A field gets its notation from its type and from
nothing else. A text that has not the form of a number is left to pydantic, whose error says what the field takes.

``fixed`` marks the fields that define the model or the data order: neither a resumed run nor a fork may change them.
``forks`` marks those that define the updates: the steps done had the old values, so a change of them makes another run,
a fork. Everything else may change when a run is resumed, and the change is recorded.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hlat.config.errors import Problem, RecipeError
from hlat.config.own_parts import Seam
from hlat.runtime.quantities import (
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
MOST_TOKENS = 2**31 - 1
"""Of a vocabulary and of a context: token ids and positions are 32-bit numbers on every device."""
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
OwnName = Annotated[str, Field(pattern=r"^([a-z][a-z0-9_-]*|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
"""Name of a part of the user's own: package.module:Name, or that of an entry point."""
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Choice = Annotated[
    Literal[True, False, "auto"],
    BeforeValidator(lambda value: _WORDS.get(value.lower(), value) if isinstance(value, str) else value),
]
"""true, false (quoted or not, as for every switch), or auto."""


class Section(BaseModel):
    """A section of a recipe: unknown keys are refused, values are immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __setattr__(self, name: str, value: Any) -> None:
        # In the words of recipes: pydantic's own error would name a frozen instance.
        remedy = 'Load it with other values, as in hlat.load_recipe(PATH, {"training.steps": 100}).'
        raise RecipeError([Problem(name, "cannot be changed in a recipe that has been loaded.", remedy)])

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, values: Any) -> Any:
        # A boolean in a numeric field (steps: yes) becomes text, which is refused: pydantic would read 1.
        if not isinstance(values, dict):
            return values
        numbers = [name for name, field in cls.model_fields.items() if _is_number(field.annotation)]
        return {**values, **{name: str(values[name]).lower() for name in numbers if isinstance(values.get(name), bool)}}


class OwnPart(Section):
    """A section that names a part of the user's own: its other fields are the options of that part.

    They are validated when the part is imported.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def own_options(self) -> dict[str, Any]:
        """The options, as the recipe has them."""
        return dict(self.model_extra or {})


def as_own(section: type[Section], own: type[OwnPart], seam: Seam, field: str, values: Any) -> OwnPart | None:
    """Validate values as a section with a part of the user's own, if that is what their ``field`` names; else None."""
    known = get_args(section.model_fields[field].annotation)  # none in ``own`` itself, whose field is any text
    name = values.get(field) if isinstance(values, dict) and known else None
    return None if name is None or name in known or not seam.has(name) else own.model_validate(values)


class ComponentSection(Section):
    """A section that asks for a training component with a state of the weights' shape.

    Plan, rehearsal and stage split count the state from this number.
    """

    bytes_per_parameter: ClassVar[int] = 0
    """Bytes that the component keeps for each parameter element, on the rank that stores the element."""


def _is_number(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return annotation in (int, float) or (len(kinds) == 1 and _is_number(kinds[0]))


def fixed(default: Any = ..., *, formerly: Any = None, **constraints: Any) -> Any:
    """Field that must not change within a run; ``formerly`` is the value of recipes older than the field."""
    # Such a field defines the model, the data order or the numbers. The rest is as in pydantic's Field.
    extra = {"resume": "fixed"} | ({} if formerly is None else {"formerly": formerly})
    return Field(default, json_schema_extra=extra, **constraints)


def forks(default: Any) -> Any:
    """Field or section whose values no step done may have had otherwise: to change them, a run is forked."""
    return Field(default, json_schema_extra={"resume": "fork"})
