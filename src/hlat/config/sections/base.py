"""Base class of the sections of a recipe, and the marks of their fields.

``fixed`` marks the fields that define the model, the data order or the trajectory: a run is not resumed after one of
them changed. Everything else may change when a run is resumed, and the change is recorded.
"""

from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hlat.config.errors import Problem, RecipeError


class Section(BaseModel):
    """A section of a recipe: unknown keys are refused, values are immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change a field.

        Raises:
            RecipeError: always, in the words of recipes.
        """
        remedy = 'Load it with other values, as in hlat.load_recipe(PATH, {"training.steps": 100}).'
        raise RecipeError([Problem(name, "cannot be changed in a recipe that has been loaded.", remedy)])

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, values: Any) -> Any:
        """Turn a boolean in a numeric field (``steps: yes``) into text, which is refused: pydantic would read 1."""
        if not isinstance(values, dict):
            return values
        numbers = [name for name, field in cls.model_fields.items() if _is_number(field.annotation)]
        return {**values, **{name: str(values[name]).lower() for name in numbers if isinstance(values.get(name), bool)}}


class ComponentSection(Section):
    """A section that asks for a training component with a state of the weights' shape.

    Plan, rehearsal and stage split count the state from this number.
    """

    bytes_per_parameter: ClassVar[int] = 0
    """Bytes that the component keeps for each parameter element, on the rank that stores the element."""


def _is_number(annotation: Any) -> bool:
    """True if a field takes a number, or a number or null."""
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return annotation in (int, float) or (len(kinds) == 1 and _is_number(kinds[0]))


def fixed(default: Any = ..., *, formerly: Any = None, **constraints: Any) -> Any:
    """A field that must not change within one run: it defines the model, the data order or the numbers.

    Args:
        default: default of the field; without one it is required.
        formerly: value in effect for recipes older than the field, if it differs from the default.
        constraints: as in pydantic's ``Field``.
    """
    extra = {"resume": "fixed"} | ({} if formerly is None else {"formerly": formerly})
    return Field(default, json_schema_extra=extra, **constraints)
