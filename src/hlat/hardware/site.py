"""The place of a cluster: the file system that takes its checkpoints, and the power that its building adds.

"5GB/s", "1.2" --parse_site--> Site -> bytes per second of storage, W at the meter
"""

import re
from dataclasses import dataclass
from typing import Literal

from hlat.hardware.cluster import Cluster
from hlat.runtime.errors import HardwareError
from hlat.runtime.quantities.formatting import rounded_text

DEFAULT_PUE = 1.14
"""Energy of a data centre over that of its machines: Amazon's mean of 2025
(https://sustainability.aboutamazon.com/environment/the-cloud). Own machine rooms: 1.63 by the same page."""
HOST_SHARE = 0.5
"""Power of processors, memory, network and fans of a machine, over the power limits of its accelerators.

A machine of eight H100 (5.6 kW of limits) drew at most 8.4 kW in training with the GPUs busy, of 10.2 kW on its plate:
Latif et al. 2025, Single-node power demand during AI training, IEEE Access 13."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_RATE = re.compile(
    r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)(b|B|bit|bytes?)\s*/\s*s(?:\s*(?:/|per)\s*(instance|cluster))?", re.IGNORECASE
)


@dataclass(frozen=True)
class StorageRate:
    """Rate of a file system, reading or writing.

    Attributes:
        bytes_per_second: bytes per second.
        per: "cluster" for the whole file system, "instance" for each instance's share.
    """

    bytes_per_second: float
    per: Literal["cluster", "instance"] = "cluster"

    def of(self, cluster: Cluster) -> float:
        """Return the bytes per second of all instances together, at most what their network carries."""
        whole = self.bytes_per_second * (cluster.count if self.per == "instance" else 1)
        return min(whole, cluster.network_rate * cluster.count)

    def __str__(self) -> str:
        each = " for each instance" if self.per == "instance" else " for the whole cluster"
        return f"{rounded_text(self.bytes_per_second / 1e9)} GB/s{each}"


@dataclass(frozen=True)
class Site:
    """The place of a cluster.

    Attributes:
        storage: rate of the shared file system; None if it is not known.
        pue: power usage effectiveness: energy of the building over that of its machines.
        pue_given: True if ``pue`` was given, False if it is the default.
    """

    storage: StorageRate | None = None
    pue: float = DEFAULT_PUE
    pue_given: bool = False

    def watts(self, cluster: Cluster) -> float | None:
        """Return an upper estimate of the power of a cluster in W; None if its chips have no published power limit.

        Every chip is at its power limit all the time, as in the estimates of LLaMA (arXiv 2302.13971, table 15), which
        leaves hosts out.
        """
        power = cluster.chip.power
        return None if power is None else cluster.chips * power.watts * (1 + HOST_SHARE) * self.pue


def parse_site(storage: str | None = None, pue: float | None = None) -> Site:
    """Read the rate of a file system, as in 5GB/s or 2GB/s/instance, and a PUE.

    Raises:
        HardwareError: a text is something else, or a number is not possible; names all of them.
    """
    problems = []
    rate = None if storage is None else _parse_rate(storage)
    if storage is not None and rate is None:
        problems.append(
            _bits_or_bytes(storage)
            or f"--storage {storage}: must be a positive rate: 5GB/s of the whole cluster, or 2GB/s/instance "
            "(GB for 10^9 bytes, Gb or Gbit for bits)"
        )
    if pue is not None and not 1 <= pue < 10:
        problems.append(f"--pue {pue:g}: energy of the building over that of its machines, from 1 up, as in 1.2")
    if problems:
        raise HardwareError("\n".join(problems))
    return Site(rate) if pue is None else Site(rate, pue, pue_given=True)


def _bits_or_bytes(text: str) -> str:
    """Return the question what 5gb/s means, written all in lower case; empty for any other text."""
    found = _RATE.fullmatch(text.strip())
    if found is None or not _is_ambiguous(found):
        return ""
    prefix = found[2].capitalize()
    return (
        f"--storage {text}: {found[2]}b may be bits or bytes; write {found[1]}{prefix}B/s for bytes, or "
        f"{found[1]}{prefix}bit/s for bits, an eighth of it"
    )


def _is_ambiguous(rate: re.Match[str]) -> bool:
    """Return True for a lower-case b after a lower-case prefix: who writes gb for Gb may as well mean GB."""
    return rate[3] == "b" and rate[2] != "" and rate[2].islower()


def _parse_rate(text: str) -> StorageRate | None:
    found = _RATE.fullmatch(text.strip())
    if found is None or not float(found[1]) or _is_ambiguous(found):
        return None
    bits = found[3] == "b" or found[3].lower() == "bit"
    rate = float(found[1]) * _UNITS[found[2].lower()] / (8 if bits else 1)
    return StorageRate(rate, "instance" if (found[4] or "").lower() == "instance" else "cluster")
