"""An accelerator that hlat does not ship: all that it takes to add one. It computes on the CPU of this machine.

Its answers differ from the CPU's wherever a CPU can compute that way too, so that a run shows which ones it used.
``asked`` collects the names of the capabilities that hlat asks for.
"""

from typing import Any

import torch

from hlat.runtime.backend.base import Backend, Collectives

asked: set[str] = set()


class OtherAccelerator(Backend):
    """A device without kernels of its own."""

    collectives = Collectives("gloo", interface_variable="OTHER_SOCKET_IFNAME")
    visible_devices_variable = "OTHER_VISIBLE_DEVICES"
    is_everywhere = True
    is_shared = True

    def __getattribute__(self, name: str) -> Any:
        """Note the name of a capability."""
        asked.add(name)
        return super().__getattribute__(name)

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: an operation has finished when it returns."""

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Return a constant."""
        return 12_345_678

    def chip_name(self, device: torch.device) -> str:
        """Return a name that the catalog does not have."""
        return "a chip of next year"


BACKEND = OtherAccelerator("other")
