"""The hardware catalog: chips and instances, loaded, validated, and looked up by name.

    catalog.yaml + instances.yaml ----+--load_catalog--> Catalog -> Chip, by the name that torch reports or EC2 family
    a user's file, if given ----------+                          -> Instance, by its name
    (its entries replace shipped ones of the same name)

A user's file has the same sections, ``sources``, ``chips`` and ``instances``; each is optional. Every figure carries
the key of its source. Names must match exactly: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" is not an A100.
"""

from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hlat.config import load_yaml, short, size_problem
from hlat.runtime.errors import HardwareError
from hlat.runtime.storage.local_files import read_small_file
from hlat.runtime.terminal import escape_name, listed

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
PriceKind = Literal["on-demand", "capacity-block", "reserved", "spot", "own"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PeakFigure(_Entry):
    """One published peak rate."""

    dense: Rate  # 10^12 FLOP/s of the whole chip, without sparsity
    source: str  # key in Catalog.sources


class ChipMemory(_Entry):
    """Capacity and bandwidth of the memory of a whole chip."""

    gib: Rate
    gb_per_second: Rate
    source: str


class PowerLimit(_Entry):
    """Power limit of a whole chip in W, as the maker rates it."""

    watts: Rate
    source: str


class ReachedShare(_Entry):
    """Share of the peak, 0 to 1, that the best of many large matrix products reaches, by dtype."""

    bfloat16: float | None = Field(None, gt=0, le=1)
    float8: float | None = Field(None, gt=0, le=1)
    source: str


class Chip(_Entry):
    """One kind of chip. ``names`` or ``ec2_families`` identify it on a machine."""

    name: str  # in the catalog
    names: list[str] = []  # that torch reports
    ec2_families: list[str] = []  # instance families with this chip
    device: str | None = None  # type in torch; None if hlat has no backend: the chip can only be planned for
    vendor: Literal["nvidia", "amd"] = "nvidia"  # of a GPU; the meaning of the capability depends on it
    capability: tuple[int, int] | None = None  # of a GPU, as torch reports it
    cores: Positive = 1  # physical, per chip
    cores_per_device: Positive = 1  # physical, per torch device, by default
    family: str | None = None  # for the planner's constants; None if the planner has none
    memory: ChipMemory | None = None
    power: PowerLimit | None = None  # None if none is published
    reached: ReachedShare | None = None
    tflops: dict[str, PeakFigure] = Field(min_length=1)  # by dtype: bfloat16, float16, tf32, float32, float8

    @property
    def devices(self) -> int:
        """Torch devices per chip."""
        return self.cores // self.cores_per_device

    @property
    def sixteen_bit(self) -> str | None:
        """The 16-bit format that the chip multiplies in, bfloat16 if it can; None without a rate of either."""
        return next((dtype for dtype in ("bfloat16", "float16") if dtype in self.tflops), None)

    @property
    def can_be_planned(self) -> bool:
        """True if the catalog has what a prediction needs: memory, a 16-bit rate and a family."""
        return self.memory is not None and self.sixteen_bit is not None and self.family is not None

    def flops(self, dtype: str, cores_per_device: int | None = None) -> float | None:
        """Dense peak FLOP/s of one torch device for ``dtype``; None if the catalog has no figure."""
        figure = self.tflops.get(dtype)
        if figure is None:
            return None
        return figure.dense * 1e12 * (cores_per_device or self.cores_per_device) / self.cores

    def source_keys(self) -> Iterator[str]:
        yield from (figure.source for figure in self.tflops.values())
        yield from (figure.source for figure in (self.memory, self.power, self.reached) if figure is not None)


class InstancePrice(_Entry):
    """Price of an instance in USD per hour."""

    usd_per_hour: Rate
    seen: date  # day on which it was seen
    since: date | None = None  # first day on which it holds, if known
    source: str
    storage: float | None = Field(None, ge=0)  # USD per 10^9 bytes and month at the same place
    egress: float | None = Field(None, ge=0)  # USD per 10^9 bytes that leave it
    origin: str = ""  # of a quote: seller, place, day and source; empty for a price of the catalog


class PastPrice(_Entry):
    """Former price of an instance in USD per hour, and its days."""

    kind: PriceKind
    usd_per_hour: Rate
    since: date  # first day on which it is known to have held
    until: date  # day from which it held no more
    source: str

    @property
    def price(self) -> InstancePrice:
        return InstancePrice(usd_per_hour=self.usd_per_hour, seen=self.since, source=self.source)


class FailureRate(_Entry):
    """Interruptions of a run per instance and day."""

    per_day: float = Field(ge=0)
    source: str


class LaunchSettings(_Entry):
    """Settings of jobs on an instance (``hlat launch``)."""

    environment: dict[str, str] = {}  # variables of the processes: network and collectives
    slurm: list[str] = []  # options of sbatch that reserve the accelerators of a machine
    kubernetes: dict[str, Positive] = {}  # resources of a pod that takes a complete machine, by their device plugin
    node_selector: dict[str, str] = {}  # labels of Kubernetes nodes of this kind
    sources: list[str] = []  # keys in Catalog.sources


class CollectiveSteps(_Entry):
    """Steps of a machine's collectives, where the library chooses an algorithm by the size of the message."""

    hop_us: Rate  # latency of a step inside the machine, in microseconds
    network_hop_us: Rate  # between machines
    direct_mb: Rate  # 10^6 bytes below which every rank sends to every other at once, by way of the other chips
    doubling_mb: Rate  # 10^6 bytes below which distances double; larger messages travel in a ring
    source: str


class Instance(_Entry):
    """One kind of machine."""

    name: str  # in the catalog
    chip: str  # its name
    chips: Positive  # per instance
    domain: Positive  # chips that share fast links
    up_to: Positive | None = None  # chips that such a machine can have; None if it is sold with `chips` only
    groups: list[Positive] = []  # sizes of tensor-parallel groups that the links support; empty for any
    link: Rate  # 10^9 bytes per second and chip over the fast links, one direction
    network: Rate  # 10^9 bytes per second and instance to others, one direction
    collectives: CollectiveSteps | None = None  # None for rings with the latencies of the time model
    source: str
    prices: dict[PriceKind, InstancePrice] = {}
    past_prices: list[PastPrice] = []
    failures: FailureRate
    launch: LaunchSettings = LaunchSettings()

    @property
    def quoted(self) -> bool:
        """True if its prices are from a file of quotes."""
        return any(price.origin for price in self.prices.values())

    def with_chips(self, chips: int) -> "Instance":
        """The machine with another number of its chips: a part of it, or more cards in the same machine."""
        share = chips / self.chips
        prices = {
            kind: price.model_copy(update={"usd_per_hour": share * price.usd_per_hour})
            for kind, price in self.prices.items()
        }
        update: dict[str, object] = {"chips": chips, "domain": chips, "prices": prices}
        # More cards fail more often. A part of a machine fails as the machine does.
        if share > 1:
            update["failures"] = self.failures.model_copy(update={"per_day": share * self.failures.per_day})
        else:
            update["domain"] = min(self.domain, chips)
        return self.model_copy(update=update)

    def source_keys(self) -> Iterator[str]:
        yield from (self.source, self.failures.source, *self.launch.sources)
        yield from (price.source for price in self.prices.values())
        yield from (price.source for price in self.past_prices)
        yield from () if self.collectives is None else (self.collectives.source,)


class Catalog(_Entry):
    """All chips and instances, and the sources of their figures."""

    sources: dict[str, str] = {}
    chips: list[Chip] = []
    instances: list[Instance] = []

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_unique("chip", [_normalize(chip.name) for chip in self.chips])
        _check_unique("chip", [_normalize(name) for chip in self.chips for name in _identifiers(chip)])
        _check_unique("instance", [_normalize(instance.name) for instance in self.instances])
        missing = sorted(self.source_keys() - self.sources.keys())
        if missing:
            raise ValueError(f"sources cited but not given: {missing}")
        for chip in self.chips:
            if not _identifiers(chip):
                raise ValueError(f"{chip.name} cannot be identified: it has neither names nor ec2_families")
            if chip.cores % chip.cores_per_device:
                raise ValueError(f"{chip.name}: {chip.cores} cores are not a multiple of {chip.cores_per_device}")
        for instance in self.instances:
            if self.chip(instance.chip) is None:
                raise ValueError(f"{instance.name}: unknown chip {instance.chip!r}")
        return self

    def source_keys(self) -> set[str]:
        of_chips = {key for chip in self.chips for key in chip.source_keys()}
        of_instances = {key for instance in self.instances for key in instance.source_keys()}
        return of_chips | of_instances

    def chip(self, name: str) -> Chip | None:
        return next((c for c in self.chips if _normalize(c.name) == _normalize(name)), None)

    def instance(self, name: str) -> Instance | None:
        return next((i for i in self.instances if _normalize(i.name) == _normalize(name)), None)

    def with_instances(self, change: Callable[[Instance], Instance]) -> Self:
        """Return the catalog with every instance changed."""
        return self.model_copy(update={"instances": [change(instance) for instance in self.instances]})

    def chip_by_torch_name(self, name: str) -> Chip | None:
        """The chip that torch reports under exactly this name, or None."""
        wanted = _normalize(name)
        return next((c for c in self.chips if wanted in map(_normalize, c.names)), None)

    def chip_by_instance_type(self, instance_type: str) -> Chip | None:
        """The chip of an EC2 instance type such as ``trn2.48xlarge``, or None."""
        family = instance_type.strip().lower().partition(".")[0]
        return next((c for c in self.chips if family in c.ec2_families), None)


def _identifiers(chip: Chip) -> list[str]:
    return [*chip.names, *chip.ec2_families]


def _check_unique(kind: str, names: list[str]) -> None:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"names of more than one {kind}: {duplicates}")


def _normalize(name: str) -> str:
    """Lower-case name with single spaces, without the maker's name, which older drivers omit."""
    return " ".join(name.lower().split()).removeprefix("nvidia ")


_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_SECTIONS = ("chips", "instances")
_MAX_LISTED = 20  # mistakes listed in a message
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 7 times as fast; not in every build of PyYAML


@cache
def load_catalog(user_file: str | Path | None = None) -> Catalog:
    """Load the catalog; entries of the user's file replace shipped ones of the same name.

    Raises:
        HardwareError: the user's file cannot be read or is inconsistent; lists each mistake.
    """
    content = _shipped()
    if user_file is not None:
        content = _with_user_entries(content, _read_user_file(Path(user_file)))
    try:
        return Catalog.model_validate(content)
    except ValidationError as error:
        # The shipped files are tested, so the mistakes are the user's.
        raise HardwareError(f"{user_file}: {_mistakes(error, content)}") from error


def _shipped() -> dict[str, Any]:
    content: dict[str, Any] = {"sources": {}}
    for name in ("catalog.yaml", "instances.yaml"):
        section = yaml.load(files("hlat.hardware").joinpath(name).read_text(encoding="utf-8"), _LOADER)
        content["sources"] |= section.pop("sources")
        content |= section
    return content


def _read_user_file(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(read_small_file(path))
    except (OSError, ValueError) as error:
        raise HardwareError(f"{path} cannot be read as YAML: {error}") from error
    if (too_large := size_problem(content)) is not None:
        raise HardwareError(f"{path}: {too_large}")
    if not isinstance(content, dict) or not content.keys() <= {"sources", *_SECTIONS}:
        raise HardwareError(f"{path}: a catalog is a mapping with the sections sources, chips, instances")
    wrong = [name for name in _SECTIONS if not isinstance(content.get(name, []), list)]
    if wrong or not isinstance(content.get("sources", {}), dict):
        raise HardwareError(
            f"{path}: chips and instances are lists, as in `instances: [{{name: mybox, ...}}]`; sources is a mapping "
            "of names to publications; `hlat hardware show p5.48xlarge` shows the fields of an instance"
        )
    return content


def _with_user_entries(shipped: dict[str, Any], user: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"sources": shipped["sources"] | user.get("sources", {})}
    for section in _SECTIONS:
        added = user.get(section, [])
        names = [entry.get("name") for entry in added if isinstance(entry, dict)]
        merged[section] = [entry for entry in shipped[section] if entry["name"] not in names] + added
    return merged


def _mistakes(error: ValidationError, content: dict[str, Any]) -> str:
    """Message for each mistake, with the entry's name instead of its index."""
    lines = []
    for mistake in error.errors():
        location = list(mistake["loc"])
        if len(location) > 1 and location[0] in _SECTIONS and isinstance(location[1], int):
            entry = content[str(location[0])][location[1]]
            location[1] = entry.get("name", location[1]) if isinstance(entry, dict) else location[1]
        value = short(mistake["input"]) if isinstance(mistake["input"], str | int | float) else ""
        lines.append(f"{escape_name('.'.join(map(str, location)))} {value}: {mistake['msg']}".strip())
    return listed(lines, _MAX_LISTED, "; ")


def installed_chip(catalog: Catalog) -> Chip | None:
    """Return the first GPU that NVIDIA's driver lists here, without starting it; None if none is known."""
    for file in sorted(_GPU_FOLDER.glob("*/information")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
        return catalog.chip_by_torch_name(names[0].strip()) if names else None
    return None
