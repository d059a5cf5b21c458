"""The sections of a recipe: one pydantic model each, one sentence per field."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.config.sections.base import Section as Section

__getattr__ = lazily(__name__, {"base": "Section"})  # packages of users import it from here
