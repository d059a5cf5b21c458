"""Fitted constants of the time model, read from constants.yaml.

    constants.yaml -> Constants -> constants.column("products", columns) -> one value per workload, by chip family

A data sheet does not state these numbers; benchmarks/planner_accuracy.py fits them to published runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from hlat.planner.problem import CHIP_FAMILIES, FAMILIES, Column, WorkloadColumns

ALL = "all"


@dataclass(frozen=True)
class Constants:
    """Values by constant and family. The family ``all`` stands for every family without a value of its own."""

    values: Mapping[tuple[str, str], float]

    def column(self, name: str, columns: WorkloadColumns) -> Column:
        """The value for each workload: of its family, else of its nearest relative's."""
        if name not in self._tables:
            self._tables[name] = np.array([self._for(name, family) for family in FAMILIES])
        return self._tables[name][columns.family.astype(np.intp)]

    @cached_property
    def _tables(self) -> dict[str, Column]:
        """Values by position of the family, for each constant asked for so far."""
        return {}

    def _for(self, name: str, family: str) -> float:
        for key in CHIP_FAMILIES[family].lookup:
            if (name, key) in self.values:
                return self.values[name, key]
        raise KeyError(f"{name} has no value for {family}")

    def shared(self, name: str) -> float:
        """The value of a constant that all families share."""
        return self.values[name, ALL]

    def with_values(self, changes: Mapping[tuple[str, str], float]) -> "Constants":
        """A copy with some values replaced."""
        return Constants({**self.values, **changes})


@dataclass(frozen=True)
class Prior:
    """Starting value of a constant in a fit, and the standard deviation of its logarithm."""

    value: float
    spread: float


def _content() -> dict[str, Any]:
    text = files("hlat.planner.cost").joinpath("constants.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@cache
def load_constants() -> Constants:
    """The values that predictions use."""
    values = {}
    for name, entry in _content().items():
        for family, value in (entry.get("value") or _priors_of(entry)).items():
            values[name, family] = float(value)
    return Constants(values)


@cache
def load_priors() -> dict[tuple[str, str], Prior]:
    """Priors of a fit, which starts from them and is pulled towards them."""
    return {
        (name, family): Prior(float(value), float(_spreads_of(entry).get(family, entry["prior"]["spread"])))
        for name, entry in _content().items()
        for family, value in _priors_of(entry).items()
    }


def meanings() -> dict[str, str]:
    """One sentence per constant: its meaning."""
    return {name: str(entry["meaning"]) for name, entry in _content().items()}


def _priors_of(entry: Mapping[str, Any]) -> dict[str, float]:
    return {family: value for family, value in entry["prior"].items() if family not in ("spread", "spreads")}


def _spreads_of(entry: Mapping[str, Any]) -> dict[str, float]:
    spreads: dict[str, float] = entry["prior"].get("spreads", {})
    return spreads
