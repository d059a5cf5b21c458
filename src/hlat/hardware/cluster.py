"""A cluster: a number of instances of one kind, with figures per torch device.

    "trn1.32xlarge:64" -> Cluster -> figures of one device, size of a fast-link domain, price, failures

A device is what torch calls a device: a GPU, one NeuronCore of Trainium 1, or two NeuronCores of Trainium 2 (a logical
core). All rates are per device or per instance, in bytes and FLOP per second.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hlat.hardware.catalog import Catalog, Chip, Instance, PriceKind
from hlat.hardware.quotes import Per
from hlat.runtime.errors import HardwareError

_GIB = 1 << 30
_KINDS: tuple[PriceKind, ...] = ("on-demand", "capacity-block", "reserved", "spot", "own")

_ALIKE = 3  # letters at the beginning in which names of one family agree: trn1, trn2


@dataclass(frozen=True)
class Cluster:
    """Instances of one kind, connected by their network."""

    instance: Instance
    chip: Chip
    count: int

    @property
    def name(self) -> str:
        """Name as given on the command line: INSTANCE:N."""
        return f"{self.instance.name}:{self.count}"

    @property
    def chips(self) -> int:
        """Chips of all instances."""
        return self.instance.chips * self.count

    @property
    def devices(self) -> int:
        """Torch devices of all instances; one process each."""
        return self.chips * self.chip.devices

    @property
    def devices_per_instance(self) -> int:
        """Torch devices per instance."""
        return self.instance.chips * self.chip.devices

    @property
    def domain(self) -> int:
        """Torch devices that share fast links."""
        return min(max(self.instance.domain * self.chip.devices, 1), max(self.devices, 1))

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory per device."""
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
        """Price of the whole cluster: its kind and USD per hour.

        Args:
            kind: kind of price; None for the first known kind. The result is None if the instance has no price.

        Raises:
            HardwareError: the catalog has no price of that kind.
        """
        prices = self.instance.prices
        if kind is not None and kind not in prices:
            known = ", ".join(prices) or "none"
            raise HardwareError(f"no {kind} price is known for {self.instance.name}; known: {known}")
        found = kind or next((known for known in _KINDS if known in prices), None)
        return None if found is None else (found, prices[found].usd_per_hour * self.count)


def parse_cluster(text: str, catalog: Catalog, per: Per = "instance") -> Cluster:
    """Parse ``INSTANCE:N``, or ``KxINSTANCE:N`` for machines with K of its chips: 8xrtx4090:1, 4xh100:1.

    Args:
        text: the cluster.
        catalog: chips and instances.
        per: unit of N. Chips are complete instances, or a part of one, which has the share of its price.

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
    """Return a cluster of a number of chips."""
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
    """Return full machines of cards, or one with fewer."""
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
    """Return the instance of a name, or of a name after a number of chips.

    Raises:
        HardwareError: the catalog does not have it, or such a machine cannot have so many chips.
    """
    found = catalog.instance(name)
    if found is not None:
        return found
    counted = re.fullmatch(r"(\d{1,4})\s*x\s*(\S+)", name.strip().lower())
    found = None if counted is None else catalog.instance(counted[2])
    if counted is None or found is None:
        raise HardwareError(_unknown_instance(name, catalog))
    chips, most = int(counted[1]), found.up_to or found.chips
    if not 1 <= chips <= most:
        raise HardwareError(f"{name}: a machine {found.name} has 1 to {most} chips; more machines are {found.name}:2")
    return found.with_chips(chips).model_copy(update={"name": f"{chips}x{found.name}"})


def close_names(name: str, names: Sequence[str]) -> list[str]:
    """Return names that begin as a wrong one does, or are spelled nearly as it is; at most three."""
    wrong = name.lower()
    begins = [each for each in names if wrong and each.lower().startswith(wrong)]
    alike = [each for each in names if each.lower()[:_ALIKE] == wrong[:_ALIKE] and len(wrong) >= _ALIKE]
    return begins[:3] or get_close_matches(wrong, names, n=3, cutoff=0.5) or alike[:3]


def _unknown_instance(name: str, catalog: Catalog) -> str:
    names = [instance.name for instance in catalog.instances]
    close = close_names(name, names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}."
    return f"unknown instance {name!r}; {hint} `hlat hardware list` shows all; --hardware FILE adds your own."
