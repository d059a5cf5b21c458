"""Chips as data: catalog.yaml, validated, and the two ways to find a chip in it.

    catalog.yaml -> Catalog -> Chip, by the name that torch reports or by the EC2 family of the machine

Every figure carries the key of its source. A name is matched whole: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" is not an
A100, and "NVIDIA GeForce RTX 4090 Laptop GPU" is not an RTX 4090.
"""

from functools import cache
from importlib.resources import files
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(_Entry):
    """One published number and where it was published."""

    dense: float = Field(gt=0)  # 10^12 FLOP/s of the whole chip, without sparsity
    source: str  # key of Catalog.sources


class Chip(_Entry):
    """One chip. Either ``names`` (what torch calls it) or ``ec2_families`` (where it is found) identifies it."""

    name: str
    names: list[str] = []
    ec2_families: list[str] = []
    cores: Positive = 1
    cores_per_device: Positive = 1  # physical cores that make one torch device, by default
    tflops: dict[str, Figure] = Field(min_length=1)  # by dtype: bfloat16, tf32, float32

    def flops(self, dtype: str, cores_per_device: int | None = None) -> float | None:
        """Dense FLOP/s of one torch device for ``dtype``; None where the catalog has no figure for it."""
        figure = self.tflops.get(dtype)
        if figure is None:
            return None
        return figure.dense * 1e12 * (cores_per_device or self.cores_per_device) / self.cores


class Catalog(_Entry):
    """All chips, and the sources that their figures name."""

    sources: dict[str, str]
    chips: list[Chip]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        known = [_normalize(name) for chip in self.chips for name in (*chip.names, *chip.ec2_families)]
        twice = {name for name in known if known.count(name) > 1}
        if twice:
            raise ValueError(f"named by more than one chip: {sorted(twice)}")
        cited = {figure.source for chip in self.chips for figure in chip.tflops.values()}
        if cited != self.sources.keys():
            raise ValueError(f"sources cited but not given, or given but not cited: {cited ^ self.sources.keys()}")
        for chip in self.chips:
            if not chip.names and not chip.ec2_families:
                raise ValueError(f"{chip.name} can never be found: it has neither names nor ec2_families")
            if chip.cores % chip.cores_per_device:
                raise ValueError(f"{chip.name}: {chip.cores} cores are not a multiple of {chip.cores_per_device}")
        return self

    def named(self, name: str) -> Chip | None:
        """The chip that torch reports under exactly this name, or None."""
        wanted = _normalize(name)
        return next((c for c in self.chips if wanted in map(_normalize, c.names)), None)

    def on_instance(self, instance_type: str) -> Chip | None:
        """The chip of an EC2 instance type such as ``trn2.48xlarge``, or None."""
        family = instance_type.strip().lower().partition(".")[0]
        return next((c for c in self.chips if family in c.ec2_families), None)


def _normalize(name: str) -> str:
    """Lower case, single spaces, without the maker's name, which older drivers leave out."""
    return " ".join(name.lower().split()).removeprefix("nvidia ")


@cache
def load_catalog() -> Catalog:
    """The catalog that ships with hlat."""
    text = files("hlat.hardware").joinpath("catalog.yaml").read_text(encoding="utf-8")
    return Catalog.model_validate(yaml.safe_load(text))
