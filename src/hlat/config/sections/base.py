"""What every section of a recipe has in common, and how a field is marked.

A field says in its schema whether a run may be resumed after it changed: ``fixed`` marks the fields that define
the model, the data order or the trajectory. Everything else may change between two parts of a run and is recorded.
"""

from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A section of a recipe: unknown keys are refused, values are immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, values: Any) -> Any:
        """Give ``steps: yes`` on as a text, which is refused; a truth would be taken for the number 1."""
        if not isinstance(values, dict):
            return values
        numbers = [name for name, field in cls.model_fields.items() if _is_number(field.annotation)]
        return {**values, **{name: str(values[name]).lower() for name in numbers if isinstance(values.get(name), bool)}}


def _is_number(annotation: Any) -> bool:
    """Whether a field takes a number, or a number or nothing."""
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return annotation in (int, float) or (len(kinds) == 1 and _is_number(kinds[0]))


def fixed(default: Any = ..., *, formerly: Any = None, **constraints: Any) -> Any:
    """A field that must not change within one run, because the model, its data or its numbers would be others.

    Args:
        default: of the field; none makes it required.
        formerly: the effect of a recipe from before there was such a field, where it is not that of the default.
        constraints: as of pydantic's ``Field``.
    """
    extra = {"resume": "fixed"} | ({} if formerly is None else {"formerly": formerly})
    return Field(default, json_schema_extra=extra, **constraints)
