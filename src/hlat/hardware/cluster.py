"""A cluster: so many of an instance, and what of it a layout may use.

    "trn1.32xlarge:64" -> Cluster -> figures of one device, sizes of the levels of its network, price, failures

A device is what torch calls one: a GPU, a NeuronCore of Trainium 1, two NeuronCores of Trainium 2 (a logical core). All
rates here are per device or per instance, in bytes and FLOP per second.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from hlat.hardware.catalog import Catalog, Chip, Instance, PriceKind
from hlat.runtime import HardwareError

_GIB = 1 << 30
_KINDS: tuple[PriceKind, ...] = ("on-demand", "capacity-block", "reserved", "spot", "own")


@dataclass(frozen=True)
class Cluster:
    """Instances of one kind, linked by their network."""

    instance: Instance
    chip: Chip
    count: int

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"{self.instance.name}:{self.count}"

    @property
    def chips(self) -> int:
        """Chips in all."""
        return self.instance.chips * self.count

    @property
    def devices(self) -> int:
        """Torch devices, each of which is a process of a run."""
        return self.chips * self.chip.devices

    @property
    def devices_per_instance(self) -> int:
        """Torch devices of one instance."""
        return self.instance.chips * self.chip.devices

    @property
    def domain(self) -> int:
        """Torch devices that talk over the fast links."""
        return min(max(self.instance.domain * self.chip.devices, 1), max(self.devices, 1))

    @property
    def memory_bytes(self) -> float:
        """Of one device."""
        assert self.chip.memory is not None, "a cluster is made of chips whose memory is known"
        return self.chip.memory.gib * _GIB / self.chip.devices

    @property
    def memory_rate(self) -> float:
        """Bytes per second between one device and its memory."""
        assert self.chip.memory is not None, "a cluster is made of chips whose memory is known"
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
        """The kind and USD per hour of the whole cluster; without a kind the first of those known; None without any.

        Raises:
            HardwareError: the catalog has no price of that kind.
        """
        prices = self.instance.prices
        if kind is not None and kind not in prices:
            known = ", ".join(prices) or "none"
            raise HardwareError(f"no {kind} price is known for {self.instance.name}; known: {known}")
        found = kind or next((one for one in _KINDS if one in prices), None)
        return None if found is None else (found, prices[found].usd_per_hour * self.count)


def parse_cluster(text: str, catalog: Catalog) -> Cluster:
    """A cluster from ``INSTANCE:N``.

    Raises:
        HardwareError: not of that form, an instance that the catalog does not know, or a count below one.
    """
    name, colon, number = text.strip().rpartition(":")
    if not colon or not name:
        raise HardwareError(f"cluster {text!r}: write INSTANCE:N, as in trn1.32xlarge:64")
    if not number.isascii() or not number.lstrip("-").isdecimal():
        raise HardwareError(f"cluster {text!r}: {number!r} is not a number of instances; write {name}:8")
    if int(number) < 1:
        raise HardwareError(f"cluster {text!r}: a cluster has at least one instance; write {name}:1 or more")
    instance = catalog.instance(name)
    if instance is None:
        raise HardwareError(_unknown(name, catalog))
    chip = catalog.chip(instance.chip)
    assert chip is not None, "the catalog has been validated"
    if chip.memory is None or "bfloat16" not in chip.tflops or chip.family is None:
        raise HardwareError(f"cluster {text!r}: {chip.name} has no memory, family or bfloat16 figure in the catalog")
    return Cluster(instance, chip, int(number))


def _unknown(name: str, catalog: Catalog) -> str:
    names = [one.name for one in catalog.instances]
    close = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}."
    return f"no instance is called {name!r}; {hint} `hlat hardware list` shows all; --hardware FILE adds your own."
