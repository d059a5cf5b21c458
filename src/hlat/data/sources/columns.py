"""The columns of the sources of a recipe: their kinds and their names.

data.sources[].text_column, else data.text_column --> kind and name
"""

from typing import Any, NamedTuple

from hlat.config import DataConfig
from hlat.data.formats.columns import COLUMN_KINDS
from hlat.data.formats.columns.base import ColumnKind


class SourceColumn(NamedTuple):
    """A column that holds the documents of a source."""

    kind: ColumnKind
    name: str


def source_columns(config: DataConfig) -> list[SourceColumn]:
    """Return the column of data.path, if there is one, and of each of data.sources."""
    own = [] if config.path is None else [default_column(config)]
    return [*own, *(_first_named(source, config) for source in config.sources)]


def default_column(config: DataConfig) -> SourceColumn:
    """Return the column of data.path, data.validation.path, and of sources that name none."""
    return _first_named(config)


def _first_named(*sections: Any) -> SourceColumn:
    """Return the column that the first of the sections names that names any."""
    named = ((kind, getattr(section, kind.field)) for section in sections for kind in COLUMN_KINDS)
    return next(SourceColumn(kind, name) for kind, name in named if name is not None)
