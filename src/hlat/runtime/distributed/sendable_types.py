"""Registry of hlat's own types that processes of a run send to each other. It does not need torch.

Decoding a message can create objects of these types and of no others; see ``wire_format.py``.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import TypeVar

C = TypeVar("C", bound=type)

_REGISTRY: dict[str, tuple[type, tuple[str, ...]]] = {}

SENDABLE: Mapping[str, tuple[type, tuple[str, ...]]] = MappingProxyType(_REGISTRY)
"""Registered types by name: the type, and the names of its fields. Only imported modules have registered theirs."""


def sendable(kind: C) -> C:
    """Register a dataclass, NamedTuple or pydantic model: its fields are sent, and its constructor is called."""
    if is_dataclass(kind):
        names = tuple(field.name for field in fields(kind))
    else:
        names = tuple(getattr(kind, "_fields", None) or kind.model_fields)  # type: ignore[attr-defined]
    assert kind.__name__ not in _REGISTRY, "types are identified by their names"
    _REGISTRY[kind.__name__] = kind, names
    return kind
