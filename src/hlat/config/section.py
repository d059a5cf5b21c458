"""What every section of a recipe has in common, and how a field is marked.

A field says in its schema whether a run may be resumed after it changed: ``fixed`` marks the fields that define
the model, the data order or the trajectory. Everything else may change between two parts of a run and is recorded.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of a recipe: unknown keys are refused, values are immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def fixed(default: Any = ..., *, formerly: Any = None, **constraints: Any) -> Any:
    """A field that must not change within one run, because the model, its data or its numbers would be others.

    Args:
        default: of the field; none makes it required.
        formerly: the effect of a recipe from before there was such a field, where it is not that of the default.
        constraints: as of pydantic's ``Field``.
    """
    extra = {"resume": "fixed"} | ({} if formerly is None else {"formerly": formerly})
    return Field(default, json_schema_extra=extra, **constraints)
