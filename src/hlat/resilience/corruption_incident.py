"""Corruption incident: replicas that differed after a step, recorded until that step has been repeated.

    mismatches of a step --CorruptionIncident--> <run>/integrity.json --the step, repeated--> ranks that were wrong, or
                                                                                              a repeated incident

Two replicas that differ do not show which one is right. But a step that is repeated in the same layout gives the same
bits, so its digests are those of a right replica: a rank that had another digest was wrong. A replica that received
gradients from a wrong one for more than a step is wrong itself; then no rank can be named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.resilience.replica_check import Mismatch
from hlat.runtime.distributed.sendable_types import sendable


@sendable
@dataclass(frozen=True)
class CorruptionIncident:
    """Replicas that differed after a step.

    Attributes:
        step: the step after which they differed.
        layout: description of the run's layout; only the same layout repeats the same bits.
        mismatches: the tensors that differed.
        hosts: host name of each rank.
        repeated: number of incidents in a row with the same ranks, including this one.
    """

    step: int
    layout: str
    mismatches: tuple[Mismatch, ...]
    hosts: tuple[str, ...]
    repeated: int = 1

    @classmethod
    def from_mismatches(
        cls,
        step: int,
        layout: str,
        mismatches: Sequence[Mismatch],
        hosts: Sequence[str],
        earlier: "CorruptionIncident | None",
    ) -> "CorruptionIncident":
        """Make the incident of these mismatches; ``earlier`` is the previous one, to count repetitions."""
        found = cls(step, layout, tuple(mismatches), tuple(hosts))
        again = earlier is not None and (found.suspects, found.suspect_hosts) == (
            earlier.suspects,
            earlier.suspect_hosts,
        )
        return cls(step, layout, found.mismatches, found.hosts, earlier.repeated + 1 if earlier and again else 1)

    @property
    def outvoted(self) -> list[int]:
        """Ranks that differ from a majority; empty if there is no majority."""
        return sorted({rank for mismatch in self.mismatches for rank in mismatch.outvoted})

    @property
    def suspects(self) -> list[int]:
        """Ranks of which at least one was wrong: the outvoted ones, or else all whose replicas differ."""
        return self.outvoted or sorted({rank for mismatch in self.mismatches for rank in mismatch.ranks})

    @property
    def suspect_hosts(self) -> list[str]:
        """Host names of the suspects."""
        return [self.hosts[rank] for rank in self.suspects]

    def wrong_ranks(self, right: Mapping[str, int]) -> list[int]:
        """Return the ranks that were wrong; empty if all replicas differed from the repeated step.

        Args:
            right: digests of the repeated step, by name.
        """
        wrong = {
            rank for mismatch in self.mismatches for rank, digest in mismatch.digests if digest != right[mismatch.name]
        }
        holders = {rank for mismatch in self.mismatches for rank in mismatch.ranks}
        return sorted(wrong) if wrong != holders or len(holders) == 1 else []

    def state(self) -> dict[str, Any]:
        """Return the incident as JSON values."""
        return {
            "step": self.step,
            "layout": self.layout,
            "hosts": list(self.hosts),
            "repeated": self.repeated,
            "copies": {mismatch.name: [list(digest) for digest in mismatch.digests] for mismatch in self.mismatches},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "CorruptionIncident":
        """Make an incident from JSON values, as returned by ``state``.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is invalid.
        """
        mismatches = tuple(
            Mismatch(str(name), tuple((int(rank), int(digest)) for rank, digest in digests))
            for name, digests in state["copies"].items()
        )
        hosts = tuple(str(host) for host in state["hosts"])
        if not mismatches or any(rank >= len(hosts) for mismatch in mismatches for rank in mismatch.ranks):
            raise ValueError("replicas of an unknown rank, or none")
        return cls(int(state["step"]), str(state["layout"]), mismatches, hosts, int(state["repeated"]))
