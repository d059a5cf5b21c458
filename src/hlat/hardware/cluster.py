"""A cluster: a number of instances of one kind, what they cost, and the place where they stand.

    "trn1.32xlarge:64", catalog --parse_cluster--> Cluster -> figures of one device, fast-link domain, price, failures
    "5GB/s", "1.2" --parse_site--> Site -> bytes per second of storage, W at the meter
    "8x400 Gb/s" --with_network--> catalog whose instances all send so much to others

A device is what torch calls a device: a GPU, one NeuronCore of Trainium 1, or two NeuronCores of Trainium 2 (a logical
core). All rates are per device or per instance, in bytes and FLOP per second.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from hlat.hardware.catalog import Catalog, Chip, Instance, PriceKind
from hlat.runtime.errors import HardwareError
from hlat.runtime.quantities import rounded_text
from hlat.runtime.terminal import listed

Per = Literal["chip", "instance"]
"""Unit of a number of machines, or of a price."""

_GIB = 1 << 30
_KINDS: tuple[PriceKind, ...] = get_args(PriceKind)
_LISTED = 3  # names in a message

_ALIKE = 3  # letters at the beginning in which names of one family agree: trn1, trn2


@dataclass(frozen=True)
class Cluster:
    """Instances of one kind, connected by their network."""

    instance: Instance
    chip: Chip
    count: int

    @property
    def name(self) -> str:
        """INSTANCE:N, as on the command line."""
        return f"{self.instance.name}:{self.count}"

    @property
    def chips(self) -> int:
        return self.instance.chips * self.count

    @property
    def devices(self) -> int:
        """Torch devices of all instances; one process each."""
        return self.chips * self.chip.devices

    @property
    def devices_per_instance(self) -> int:
        return self.instance.chips * self.chip.devices

    @property
    def domain(self) -> int:
        """Torch devices that share fast links."""
        return min(max(self.instance.domain * self.chip.devices, 1), max(self.devices, 1))

    @property
    def memory_bytes(self) -> float:
        """Memory of one torch device, of which a chip may have several."""
        assert self.chip.memory is not None, "parse_cluster accepts only chips with known memory"
        return self.chip.memory.gib * _GIB / self.chip.devices

    @property
    def memory_rate(self) -> float:
        """Bytes per second between one device and its memory."""
        assert self.chip.memory is not None, "parse_cluster accepts only chips with known memory"
        return self.chip.memory.gb_per_second * 1e9 / self.chip.devices

    @property
    def link_rate(self) -> float:
        """Bytes per second that one device sends over the fast links."""
        return self.instance.link * 1e9 / self.chip.devices

    @property
    def network_rate(self) -> float:
        """Bytes per second that one instance sends to others."""
        return self.instance.network * 1e9

    def price(self, kind: PriceKind | None = None) -> tuple[PriceKind, float] | None:
        """Kind and USD per hour of the price of the whole cluster; None if the instance has no price.

        Without a kind, the first known one is taken. HardwareError: the catalog has no price of that kind.
        """
        prices = self.instance.prices
        if kind is not None and kind not in prices:
            raise HardwareError(no_price(kind, [self.instance]))
        found = kind or next((known for known in _KINDS if known in prices), None)
        return None if found is None else (found, prices[found].usd_per_hour * self.count)


def no_price(kind: PriceKind, instances: Sequence[Instance]) -> str:
    """Say that instances have no price of a kind, and how to give one."""
    names = [instance.name for instance in instances]
    known = [each for each in _KINDS if any(each in instance.prices for instance in instances)]
    # Nobody sells spot instances at a price that a catalog could keep.
    one = "--price X/h --interruptions N" if kind == "spot" else "--price X/h"
    return (
        f"no {kind} price is known for {listed(names, _LISTED)}; known: {', '.join(known) or 'none'}. "
        f"`hlat plan` takes yours: {one} for a chip of any machine, or --quotes FILE with a column {kind} for prices "
        "of each (`hlat hardware quotes` prints a file to fill in)"
    )


def parse_cluster(text: str, catalog: Catalog, per: Per = "instance") -> Cluster:
    """Parse ``INSTANCE:N``, or ``KxINSTANCE:N`` for machines with K of its chips: 8xrtx4090:1, 4xh100:1.

    With ``per="chip"``, N chips are complete instances, or a part of one, which has the share of its price.

    Raises:
        HardwareError: malformed text, an instance that the catalog does not have, a count below one, or chips that are
            not complete instances.
    """
    name, colon, number = text.strip().rpartition(":")
    if not colon or not name:
        raise HardwareError(f"cluster {text!r}: write INSTANCE:N, as in trn1.32xlarge:64")
    if not number.isascii() or not number.lstrip("-").isdecimal():
        raise HardwareError(f"cluster {text!r}: {number!r} is not a number of instances; write {name}:8")
    if int(number) < 1:
        raise HardwareError(f"cluster {text!r}: a cluster has at least one instance; write {name}:1 or more")
    instance = _find_instance(name, catalog)
    chip = catalog.chip(instance.chip)
    assert chip is not None, "the catalog has been validated"
    if not chip.can_be_planned:
        raise HardwareError(f"cluster {text!r}: {chip.name} has no memory, family or 16-bit figure in the catalog")
    if per == "instance":
        return Cluster(instance, chip, int(number))
    return _of_chips(instance, chip, int(number))


def _of_chips(instance: Instance, chip: Chip, chips: int) -> Cluster:
    # A card of the catalog is a machine of one, which can hold more.
    if instance.up_to is not None and instance.chips == 1 < chips:
        return _of_cards(instance, chip, chips, instance.up_to)
    count, rest = divmod(chips, instance.chips)
    if not rest:
        return Cluster(instance, chip, count)
    if count:
        lower, upper = count * instance.chips, (count + 1) * instance.chips
        raise HardwareError(
            f"cluster {instance.name}:{chips}: {chips} chips are not complete instances of {instance.chips}; write "
            f"{instance.name}:{lower} or {instance.name}:{upper}, or a part of one instance, {instance.name}:1 to "
            f"{instance.name}:{instance.chips - 1}"
        )
    name = f"{instance.name}[{chips} of {instance.chips} chips]"
    return Cluster(instance.with_chips(chips).model_copy(update={"name": name}), chip, 1)


def _of_cards(instance: Instance, chip: Chip, chips: int, most: int) -> Cluster:
    """Full machines of cards, or one with fewer."""
    count, rest = divmod(chips, most)
    if count and rest:
        raise HardwareError(
            f"cluster {instance.name}:{chips}: a machine has up to {most} of these cards; write "
            f"{instance.name}:{count * most} or {instance.name}:{(count + 1) * most}, or machines of fewer, as in "
            f"4x{instance.name}:N without --per chip"
        )
    each = most if count else chips
    name = f"{each}x{instance.name}"
    return Cluster(instance.with_chips(each).model_copy(update={"name": name}), chip, max(1, count))


def _find_instance(name: str, catalog: Catalog) -> Instance:
    """The instance of a name, or of a name after a number of chips; HardwareError for others."""
    found = catalog.instance(name)
    if found is not None:
        return found
    counted = re.fullmatch(r"(\d{1,4})\s*x\s*(\S+)", name.strip().lower())
    found = None if counted is None else catalog.instance(counted[2])
    if counted is None or found is None:
        raise HardwareError(unknown_instance(name, catalog))
    chips, most = int(counted[1]), found.up_to or found.chips
    if not 1 <= chips <= most:
        raise HardwareError(f"{name}: a machine {found.name} has 1 to {most} chips; more machines are {found.name}:2")
    return found.with_chips(chips).model_copy(update={"name": f"{chips}x{found.name}"})


def close_names(name: str, names: Sequence[str]) -> list[str]:
    """At most three names that begin as a wrong one does, or are spelled nearly as it is."""
    wrong = name.lower()
    begins = [each for each in names if wrong and each.lower().startswith(wrong)]
    alike = [each for each in names if each.lower()[:_ALIKE] == wrong[:_ALIKE] and len(wrong) >= _ALIKE]
    return begins[:3] or get_close_matches(wrong, names, n=3, cutoff=0.5) or alike[:3]


def unknown_instance(name: str, catalog: Catalog) -> str:
    """Say that the catalog has no such instance, and which it may be."""
    names = [instance.name for instance in catalog.instances]
    close = close_names(name, names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}."
    return f"unknown instance {name!r}; {hint} `hlat hardware list` shows all; --hardware FILE adds your own."


DEFAULT_PUE = 1.14
"""Energy of a data centre over that of its machines: Amazon's mean of 2025
(https://sustainability.aboutamazon.com/environment/the-cloud). Own machine rooms: 1.63 by the same page."""
HOST_SHARE = 0.5
"""Power of processors, memory, network and fans of a machine, over the power limits of its accelerators.

A machine of eight H100 (5.6 kW of limits) drew at most 8.4 kW in training with the GPUs busy, of 10.2 kW on its plate:
Latif et al. 2025, Single-node power demand during AI training, IEEE Access 13."""

_BYTE_UNITS = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_STORAGE_RATE = re.compile(
    r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)(b|B|bit|bytes?)\s*/\s*s(?:\s*(?:/|per)\s*(instance|cluster))?", re.IGNORECASE
)


@dataclass(frozen=True)
class StorageRate:
    """Rate of a file system, reading or writing."""

    bytes_per_second: float
    per: Literal["cluster", "instance"] = "cluster"  # of the whole file system, or of each instance

    def of(self, cluster: Cluster) -> float:
        """Bytes per second of all instances together, at most what their network carries."""
        whole = self.bytes_per_second * (cluster.count if self.per == "instance" else 1)
        return min(whole, cluster.network_rate * cluster.count)

    def __str__(self) -> str:
        each = " for each instance" if self.per == "instance" else " for the whole cluster"
        return f"{rounded_text(self.bytes_per_second / 1e9)} GB/s{each}"


@dataclass(frozen=True)
class Site:
    """Storage and power overhead of the place of a cluster."""

    storage: StorageRate | None = None  # of the shared file system; None if not known
    pue: float = DEFAULT_PUE  # power usage effectiveness: energy of the building over that of its machines
    pue_given: bool = False  # False for the default

    def watts(self, cluster: Cluster) -> float | None:
        """Upper estimate of the power of a cluster in W; None if its chips have no published power limit."""
        # Every chip at its limit all the time, as in LLaMA (arXiv 2302.13971, table 15), which leaves hosts out.
        power = cluster.chip.power
        return None if power is None else cluster.chips * power.watts * (1 + HOST_SHARE) * self.pue


def parse_site(storage: str | None = None, pue: float | None = None) -> Site:
    """Read the rate of a file system, as in 5GB/s or 2GB/s/instance, and a PUE.

    HardwareError: a text is something else, or a number is not possible; names all of them.
    """
    problems = []
    rate = None if storage is None else _parse_rate(storage)
    if isinstance(rate, str):
        problems.append(f"--storage {storage}: {rate}")
    if pue is not None and not 1 <= pue < 10:
        problems.append(f"--pue {pue:g}: energy of the building over that of its machines, from 1 up, as in 1.2")
    if problems:
        raise HardwareError("\n".join(problems))
    assert not isinstance(rate, str), "a problem has been raised"
    return Site(rate) if pue is None else Site(rate, pue, pue_given=True)


def _parse_rate(text: str) -> StorageRate | str:
    """Parse a rate; or return what is wrong with it."""
    found = _STORAGE_RATE.fullmatch(text.strip())
    # Who writes gb for Gb, all in lower case, may as well mean GB.
    if found is not None and found[3] == "b" and found[2] != "" and found[2].islower():
        prefix = found[2].capitalize()
        return (
            f"{found[2]}b may be bits or bytes; write {found[1]}{prefix}B/s for bytes, or {found[1]}{prefix}bit/s for "
            "bits, an eighth of it"
        )
    if found is None or not float(found[1]):
        return (
            "must be a positive rate: 5GB/s of the whole cluster, or 2GB/s/instance (GB for 10^9 bytes, Gb or Gbit for "
            "bits)"
        )
    bits = found[3] == "b" or found[3].lower() == "bit"
    rate = float(found[1]) * _BYTE_UNITS[found[2].lower()] / (8 if bits else 1)
    return StorageRate(rate, "instance" if (found[4] or "").lower() == "instance" else "cluster")


# A number of adapters, their name, the rate of one, the machine: 8x ConnectX-7 400 Gb/s per node. A name begins with a
# letter, so that its digits are no rate.
_NETWORK = re.compile(
    r"(?:([1-9]\d{0,2})\s*[x×]\s*)?(?:[A-Za-z]\w*(?:-\w+)*\s+){0,3}(\d+(?:\.\d+)?\s*[A-Za-z]+?)(?:/s|ps)"
    r"(?:\s*(?:/|per)\s*(?:instance|machine|node))?",
    re.IGNORECASE,
)


def with_network(catalog: Catalog, text: str | None) -> Catalog:
    """Return a catalog whose instances all send so many bytes per second to others; None leaves the catalog's rates.

    HardwareError: the text is no rate of a machine, as 400 GB/s, 3200 Gb/s or 8x400 Gb/s is.
    """
    if text is None:
        return catalog
    found = _NETWORK.fullmatch(text.strip())
    rate = _parse_rate(f"{found[2]}/s") if found is not None else ""
    if found is None or isinstance(rate, str):
        says = "must be the rate of one machine to others: 400 GB/s, 3200 Gb/s, or 8x400 Gb/s for eight adapters"
        # That a rate may be bits or bytes holds of a network too; other words about it are of storage.
        unclear = isinstance(rate, str) and "bits or bytes" in rate
        raise HardwareError(f"--network {text}: {rate if unclear else says}")
    network = int(found[1] or 1) * rate.bytes_per_second / 1e9
    return catalog.with_instances(lambda instance: instance.model_copy(update={"network": network}))
