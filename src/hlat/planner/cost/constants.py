"""Fitted constants of the time model, read from constants.yaml.

    constants.yaml -> Constants -> constants.column("products", columns) -> one value per workload, by chip family

A data sheet does not state these numbers; benchmarks/planner_accuracy.py fits them to published runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files

import numpy as np
import yaml

from hlat.planner.problem.families import CHIP_FAMILIES, FAMILIES
from hlat.planner.problem.workload import Column, WorkloadColumns

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


@cache
def load_constants() -> Constants:
    """The values that predictions use."""
    content = yaml.safe_load(files("hlat.planner.cost").joinpath("constants.yaml").read_text(encoding="utf-8"))
    return Constants(
        {(name, family): float(value) for name, entry in content.items() for family, value in entry["value"].items()}
    )
