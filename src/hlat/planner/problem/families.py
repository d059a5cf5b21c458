"""Families of chips: groups that share constants of the time model, and those whose constants are another family's.

    family of a chip -> families to look a constant up in, the nearest first; what to say if no published run is known

A family without published runs takes the constants of its nearest relative, for a reason that a plan states, and its
predictions get a wider range.
"""

from dataclasses import dataclass

GPU, ALL = "gpu", "all"
"""Names of values that NVIDIA's families share, and that all share (constants.yaml)."""


@dataclass(frozen=True)
class ChipFamily:
    """A family of chips.

    Attributes:
        name: name in the hardware catalog.
        like: family whose constants it takes; empty for one with constants of its own.
        reason: why those; empty for one with constants of its own.
        spread: standard deviation of the logarithm of the step time that borrowed constants add.
        compiled: True if a compiler builds complete programs for its chips.
        nvidia: True for NVIDIA's, some of whose constants are shared.
        first_kernels: True if torch has no FlashAttention 2 for its chips.
    """

    name: str
    like: str = ""
    reason: str = ""
    spread: float = 0.0
    compiled: bool = False
    nvidia: bool = False
    first_kernels: bool = False

    @property
    def lookup(self) -> tuple[str, ...]:
        """Names under which its constants are found, the nearest first."""
        return tuple(filter(None, (self.name, self.like, GPU * self.nvidia, ALL)))


# The spread of a relative by the same maker: as far as the constants of ampere, hopper and blackwell are from each
# other, about a fifth. Of another maker's: as the prior of `products` for Trainium's compiler, 0.3.
_SAME_MAKER, _OTHER_MAKER = 0.2, 0.3
CHIP_FAMILIES = {
    family.name: family
    for family in (
        ChipFamily("ampere", nvidia=True),
        ChipFamily("hopper", nvidia=True),
        ChipFamily("blackwell", nvidia=True),
        ChipFamily("trainium", compiled=True),
        ChipFamily("tpu", compiled=True),
        ChipFamily("measured"),
        ChipFamily(
            "volta", "ampere", "tensor cores of the generations before", _SAME_MAKER, nvidia=True, first_kernels=True
        ),
        ChipFamily("graphics", "ampere", "the same tensor-core instructions, on GDDR memory", _SAME_MAKER, nvidia=True),
        ChipFamily("cdna", "hopper", "a GPU with the same kind of kernels, by another maker", _OTHER_MAKER),
        ChipFamily("xe", "ampere", "a GPU with the same kind of kernels, by another maker", _OTHER_MAKER),
        ChipFamily("gaudi", "tpu", "few large matrix units behind a graph compiler", _OTHER_MAKER, compiled=True),
    )
}
"""All families by name; ``measured`` is a machine measured by the user."""

FAMILIES = tuple(CHIP_FAMILIES)
"""Names of the families; columns of workloads hold their position here."""


def borrowed_constants(family: str) -> str:
    """Say whose constants a family without published runs takes, and why; empty for a family with its own."""
    found = CHIP_FAMILIES[family]
    if not found.like:
        return ""
    return f"no published run of this chip family ({family}) was used: constants of {found.like} ({found.reason})"
