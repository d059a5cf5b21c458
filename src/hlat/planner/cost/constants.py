"""The few numbers of the time model that are not in a data sheet: constants.yaml, read, and varied by a fit.

constants.yaml -> Constants -> constants.of("products", columns) -> one value per work, by the family of its chip
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from hlat.planner.problem import FAMILIES, Column, WorkloadColumns

ALL = "all"
_GROUPS = {"ampere": "gpu", "hopper": "gpu", "blackwell": "gpu"}  # families that a value may be common to


@dataclass(frozen=True)
class Constants:
    """Values by name and family; ``all`` are all families without a value of their own."""

    values: Mapping[tuple[str, str], float]

    def of(self, name: str, columns: WorkloadColumns) -> Column:
        """The value that holds for each work: that of its family, of the group of families, or of all."""
        table = np.array([self._for(name, family) for family in FAMILIES])
        return table[columns.family.astype(np.intp)]

    def _for(self, name: str, family: str) -> float:
        for key in (family, _GROUPS.get(family, ALL), ALL):
            if (name, key) in self.values:
                return self.values[name, key]
        raise KeyError(f"{name} has no value for {family}")

    def one(self, name: str) -> float:
        """The value of a constant that all families share."""
        return self.values[name, ALL]

    def changed(self, changes: Mapping[tuple[str, str], float]) -> "Constants":
        """With other values for some."""
        return Constants({**self.values, **changes})


@dataclass(frozen=True)
class Prior:
    """A starting value of a constant, and the logarithm's standard deviation."""

    value: float
    spread: float


def _content() -> dict[str, Any]:
    text = files("hlat.planner.cost").joinpath("constants.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@cache
def load_constants() -> Constants:
    """What predictions use."""
    values = {}
    for name, entry in _content().items():
        for family, value in (entry.get("value") or _priors_of(entry)).items():
            values[name, family] = float(value)
    return Constants(values)


@cache
def load_priors() -> dict[tuple[str, str], Prior]:
    """What a fit starts from and is pulled towards."""
    return {
        (name, family): Prior(float(value), float(_spreads_of(entry).get(family, entry["prior"]["spread"])))
        for name, entry in _content().items()
        for family, value in _priors_of(entry).items()
    }


def meanings() -> dict[str, str]:
    """What each constant means, in words."""
    return {name: str(entry["meaning"]) for name, entry in _content().items()}


def _priors_of(entry: Mapping[str, Any]) -> dict[str, float]:
    return {family: value for family, value in entry["prior"].items() if family not in ("spread", "spreads")}


def _spreads_of(entry: Mapping[str, Any]) -> dict[str, float]:
    spreads: dict[str, float] = entry["prior"].get("spreads", {})
    return spreads
