"""Hardware as data: chips and instances, validated, and the ways to find one.

    catalog.yaml, instances.yaml, a user's file -> Catalog -> Chip, by the name that torch reports or by the EC2 family
                                                           -> Instance, by its name

Every figure carries the key of its source. A name is matched whole: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" is not an
A100, and "NVIDIA GeForce RTX 4090 Laptop GPU" is not an RTX 4090.
"""

from collections.abc import Iterator
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
PriceKind = Literal["on-demand", "capacity-block", "reserved", "spot", "own"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PeakFigure(_Entry):
    """One published number and where it was published."""

    dense: Rate  # 10^12 FLOP/s of the whole chip, without sparsity
    source: str  # key of Catalog.sources


class ChipMemory(_Entry):
    """The memory of a whole chip."""

    gib: Rate
    gb_per_second: Rate
    source: str


class ReachedShare(_Entry):
    """The share of the peak that the best of many large products reaches, 0 to 1."""

    bfloat16: float | None = Field(None, gt=0, le=1)
    float8: float | None = Field(None, gt=0, le=1)
    source: str


class Chip(_Entry):
    """One chip. ``names`` (what torch calls it) or ``ec2_families`` (where it is found) identify it on a machine."""

    name: str
    names: list[str] = []
    ec2_families: list[str] = []
    cores: Positive = 1
    cores_per_device: Positive = 1  # physical cores that make one torch device, by default
    family: str | None = None  # chips that the planner's constants are common to; None: the planner does not know it
    units: Positive = 1  # processors that tiles of a product are dealt out to
    memory: ChipMemory | None = None
    reached: ReachedShare | None = None
    tflops: dict[str, PeakFigure] = Field(min_length=1)  # by dtype: bfloat16, tf32, float32, float8

    @property
    def devices(self) -> int:
        """Torch devices that one chip is."""
        return self.cores // self.cores_per_device

    def flops(self, dtype: str, cores_per_device: int | None = None) -> float | None:
        """Dense FLOP/s of one torch device for ``dtype``; None where the catalog has no figure for it."""
        figure = self.tflops.get(dtype)
        if figure is None:
            return None
        return figure.dense * 1e12 * (cores_per_device or self.cores_per_device) / self.cores

    def source_keys(self) -> Iterator[str]:
        """Keys of the sources of its figures."""
        yield from (figure.source for figure in self.tflops.values())
        yield from (one.source for one in (self.memory, self.reached) if one is not None)


class InstancePrice(_Entry):
    """What an instance costs."""

    usd_per_hour: Rate
    seen: date
    source: str


class FailureRate(_Entry):
    """How often an instance interrupts a run."""

    per_day: float = Field(ge=0)
    source: str


class Instance(_Entry):
    """One machine that can be had."""

    name: str
    chip: str
    chips: Positive
    domain: Positive  # chips that talk over the fast links
    groups: list[Positive] = []  # sizes of tensor groups that the links support; empty for any
    link: Rate  # 10^9 bytes per second and chip over the fast links, one direction
    network: Rate  # 10^9 bytes per second and instance to others, one direction
    source: str
    prices: dict[PriceKind, InstancePrice] = {}
    failures: FailureRate

    def source_keys(self) -> Iterator[str]:
        """Keys of the sources of its figures."""
        yield from (self.source, self.failures.source)
        yield from (price.source for price in self.prices.values())


class Catalog(_Entry):
    """All chips and instances, and the sources that their figures name."""

    sources: dict[str, str] = {}
    chips: list[Chip] = []
    instances: list[Instance] = []

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _unique("chip", [_normalize(chip.name) for chip in self.chips])
        _unique("chip", [_normalize(name) for chip in self.chips for name in _found(chip)])
        _unique("instance", [_normalize(one.name) for one in self.instances])
        missing = sorted(self.source_keys() - self.sources.keys())
        if missing:
            raise ValueError(f"sources cited but not given: {missing}")
        for chip in self.chips:
            if not _found(chip):
                raise ValueError(f"{chip.name} can never be found: it has neither names nor ec2_families")
            if chip.cores % chip.cores_per_device:
                raise ValueError(f"{chip.name}: {chip.cores} cores are not a multiple of {chip.cores_per_device}")
        for one in self.instances:
            if self.chip(one.chip) is None:
                raise ValueError(f"{one.name}: no chip is called {one.chip!r}")
        return self

    def source_keys(self) -> set[str]:
        """Keys of the sources of all figures."""
        return {key for chip in self.chips for key in chip.source_keys()} | {
            k for one in self.instances for k in one.source_keys()
        }

    def chip(self, name: str) -> Chip | None:
        """The chip that the catalog itself calls so."""
        return next((c for c in self.chips if _normalize(c.name) == _normalize(name)), None)

    def instance(self, name: str) -> Instance | None:
        """The instance of that name."""
        return next((one for one in self.instances if _normalize(one.name) == _normalize(name)), None)

    def chip_by_torch_name(self, name: str) -> Chip | None:
        """The chip that torch reports under exactly this name, or None."""
        wanted = _normalize(name)
        return next((c for c in self.chips if wanted in map(_normalize, c.names)), None)

    def chip_by_instance_type(self, instance_type: str) -> Chip | None:
        """The chip of an EC2 instance type such as ``trn2.48xlarge``, or None."""
        family = instance_type.strip().lower().partition(".")[0]
        return next((c for c in self.chips if family in c.ec2_families), None)


def _found(chip: Chip) -> list[str]:
    return [*chip.names, *chip.ec2_families]


def _unique(kind: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named by more than one {kind}: {twice}")


def _normalize(name: str) -> str:
    """Lower case, single spaces, without the maker's name, which older drivers leave out."""
    return " ".join(name.lower().split()).removeprefix("nvidia ")
