"""The list of hlat's own types that processes of a run send each other. It needs no torch.

What is read from another process can make objects of these types and of no others; see ``wire_format.py``.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import TypeVar

C = TypeVar("C", bound=type)

_LIST: dict[str, tuple[type, tuple[str, ...]]] = {}

SENDABLE: Mapping[str, tuple[type, tuple[str, ...]]] = MappingProxyType(_LIST)
"""By name: the type, and its fields. Those of the modules that have been imported."""


def sendable(kind: C) -> C:
    """Put a type on the list: a dataclass, a NamedTuple or a pydantic model.

    Its fields are what is sent, and what its constructor is called with.
    """
    if is_dataclass(kind):
        names = tuple(field.name for field in fields(kind))
    else:
        names = tuple(getattr(kind, "_fields", None) or kind.model_fields)  # type: ignore[attr-defined]
    assert kind.__name__ not in _LIST, "types are told apart by their names"
    _LIST[kind.__name__] = kind, names
    return kind
