"""The translation of an NxDT configuration while it is made: fields of a recipe, and notes on what differs.

A rule is a function of a translation, a key and its value. It sets fields, or notes why there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlat.config.errors import Problem, short


@dataclass(frozen=True)
class Note:
    """A remark about a setting of NxDT."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"{self.key} = {short(self.value)}: {self.text}"


@dataclass
class Translation:
    """Fields of a recipe and notes.

    Attributes:
        settings: all settings of the NxDT file, by dotted key, interpolations resolved.
        fields: fields of the recipe by dotted path.
        differs: settings that were translated to something that is not quite the same.
        lost: settings without counterpart.
        unneeded: settings that hlat needs no counterpart of.
        refused: settings that make the run one that hlat cannot do.
    """

    settings: Mapping[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    differs: list[Note] = field(default_factory=list)
    lost: list[Note] = field(default_factory=list)
    unneeded: list[Note] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)

    def differ(self, key: str, text: str) -> None:
        """Note a difference."""
        self.differs.append(Note(key, self.settings.get(key), text))

    def lose(self, key: str, text: str) -> None:
        """Note that a setting has no counterpart."""
        self.lost.append(Note(key, self.settings.get(key), text))

    def refuse(self, key: str, text: str) -> None:
        """Refuse the configuration."""
        self.refused.append(Problem(key, text, "", self.settings.get(key), True))

    def number(self, key: str, otherwise: float) -> float:
        """Return the value of a setting if it is a number, else ``otherwise``."""
        value = self.settings.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


Rule = Callable[[Translation, str, Any], None]
"""Translates a setting: (translation, key, value); the value may be None."""


def to(path: str) -> Rule:
    """Copy the value to a field; null is left out."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value is not None:
            translation.fields[path] = value

    return rule


def unneeded(reason: str) -> Rule:
    """Note that hlat needs no counterpart."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        translation.unneeded.append(Note(key, value, reason))

    return rule


def lost(reason: str, *harmless: Any) -> Rule:
    """Note that there is no counterpart, unless the value is null or one of the harmless ones."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value is not None and value not in harmless:
            translation.lose(key, reason)

    return rule


def only(reason: str, *possible: Any) -> Rule:
    """Refuse every value but null and the possible ones."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value is not None and value not in possible:
            translation.refuse(key, reason)

    return rule
