"""A mismatch of copies as it is remembered until the steps before it have been done again.

    mismatches of a step --Incident--> <run>/integrity.json --the same step, done again--> who was wrong, and whether
                                                                                           it happened again

Which of two copies was right cannot be seen from them. But a step that is done again in the same layout gives the same
bits, so what it gives then is what a right copy would have been: a rank whose digest was another one was wrong. A copy
that took in the gradients of a wrong one for more than a step is wrong itself; then nobody can be named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.resilience.replica_check import Mismatch
from hlat.runtime.distributed import sendable


@sendable
@dataclass(frozen=True)
class Incident:
    """Copies that differed.

    Attributes:
        step: after which.
        layout: of the run, in words; bits repeat only in the same one.
        mismatches: what differed.
        hosts: the machine of each rank.
        repeated: how many times in a row it were the same ranks, this time included.
    """

    step: int
    layout: str
    mismatches: tuple[Mismatch, ...]
    hosts: tuple[str, ...]
    repeated: int = 1

    @classmethod
    def of(
        cls, step: int, layout: str, mismatches: Sequence[Mismatch], hosts: Sequence[str], before: "Incident | None"
    ) -> "Incident":
        """What is found now, after what was remembered."""
        found = cls(step, layout, tuple(mismatches), tuple(hosts))
        again = before is not None and (found.named, found.machines) == (before.named, before.machines)
        return cls(step, layout, found.mismatches, found.hosts, before.repeated + 1 if before and again else 1)

    @property
    def outvoted(self) -> list[int]:
        """The ranks that the others outvoted; none where nobody has a majority."""
        return sorted({rank for one in self.mismatches for rank in one.outvoted})

    @property
    def named(self) -> list[int]:
        """The ranks of which at least one was wrong: those outvoted, or all whose copies differ."""
        return self.outvoted or sorted({rank for one in self.mismatches for rank in one.ranks})

    @property
    def machines(self) -> list[str]:
        """Where these are."""
        return [self.hosts[rank] for rank in self.named]

    def wrong(self, right: Mapping[str, int]) -> list[int]:
        """Who was wrong, as the step done again says; none where every copy differed from it, so that it cannot.

        Args:
            right: digests by name, of the step done again.
        """
        wrong = {rank for one in self.mismatches for rank, found in one.copies if found != right[one.name]}
        everyone = {rank for one in self.mismatches for rank in one.ranks}
        return sorted(wrong) if wrong != everyone or len(everyone) == 1 else []

    def state(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "step": self.step,
            "layout": self.layout,
            "hosts": list(self.hosts),
            "repeated": self.repeated,
            "copies": {one.name: [list(copy) for copy in one.copies] for one in self.mismatches},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Incident":
        """The inverse of ``state``.

        Raises:
            KeyError, TypeError, ValueError: that is none.
        """
        mismatches = tuple(
            Mismatch(str(name), tuple((int(rank), int(found)) for rank, found in copies))
            for name, copies in state["copies"].items()
        )
        hosts = tuple(str(host) for host in state["hosts"])
        if not mismatches or any(rank >= len(hosts) for one in mismatches for rank in one.ranks):
            raise ValueError("copies of no rank")
        return cls(int(state["step"]), str(state["layout"]), mismatches, hosts, int(state["repeated"]))
