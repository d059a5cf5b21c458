"""A device that a rehearsal takes the decisions of, though it is not here: its type and its chip.

    "neuron", "cuda:h100", or the chip of a cluster --> SimulatedDevice --simulating--> the program decides as there

Tensors keep reporting a CPU. Simulated are the answers of the device's backend (``hlat.runtime.backend``), and the
kernel of attention, which keeps the tensors that it would keep there (``attention.py``).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from unittest.mock import patch

import torch

from hlat.hardware import Catalog, Chip, Cluster
from hlat.model import computing_as_simulated
from hlat.rehearsal.attention import simulated_attention
from hlat.runtime.backend.base import Backend
from hlat.runtime.backend.table import BACKENDS, backend_of, simulated_backend
from hlat.runtime.errors import HardwareError

_GIB = 1 << 30
_ADAM = import_module("torch.optim.adam")  # torch.optim has deleted the name


@dataclass(frozen=True)
class SimulatedDevice:
    """A device type and a chip of the hardware catalog.

    Attributes:
        device_type: name of the type in torch.
        chip: the chip.
    """

    device_type: str
    chip: Chip

    @property
    def backend(self) -> Backend:
        """Answers of the device."""
        return backend_of(self.device_type).of_chip(self.chip.vendor, self.chip.capability)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one torch device of the chip; None if the catalog does not have it."""
        return None if self.chip.memory is None else int(self.chip.memory.gib * _GIB / self.chip.devices)

    def __str__(self) -> str:
        """Type, chip and, for a GPU, its compute capability."""
        capability = self.chip.capability
        number = "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
        return f"{self.device_type} ({self.chip.name}{number})"


def parse_device(text: str | None, cluster: Cluster | None, catalog: Catalog) -> SimulatedDevice | None:
    """Find the device that a rehearsal is to simulate.

    Args:
        text: TYPE or TYPE:CHIP, as in "cuda:h100"; None for that of the cluster.
        cluster: gives the chip if ``text`` does not; None if there is no cluster.
        catalog: the hardware catalog.

    Returns:
        The device; None for the CPU of this machine, which needs no simulation.

    Raises:
        HardwareError: no such device type or chip; or the chip is of another type.
    """
    if text is None and cluster is None:
        return None
    wanted, _, name = (text or "").partition(":")
    if text is not None and wanted not in BACKENDS:
        raise HardwareError(f"--device {text}: no device type {wanted!r}; write {', '.join(BACKENDS)}, or cuda:h100.")
    if text is not None and backend_of(wanted).is_everywhere:
        return None
    chips = [chip for chip in catalog.chips if chip.device is not None and chip.device == (wanted or chip.device)]
    if name:
        found = [chip for chip in chips if _is_called(chip, name)]
        if not found:
            known = ", ".join(chip.name for chip in chips)
            raise HardwareError(f"--device {text}: no chip {name!r} of type {wanted} in the catalog; known: {known}.")
        return SimulatedDevice(wanted, found[0])
    if cluster is not None:
        return _of_cluster(wanted, cluster)
    if len({chip.capability for chip in chips}) > 1:
        raise HardwareError(
            f"--device {text}: decisions depend on the chip. Name one, as in --device {wanted}:h100, or a cluster, as "
            "in --cluster p5.48xlarge:8."
        )
    return SimulatedDevice(wanted, chips[0])


def _of_cluster(wanted: str, cluster: Cluster) -> SimulatedDevice:
    chip = cluster.chip
    if chip.device is None:
        raise HardwareError(
            f"--cluster {cluster.name}: hlat has no backend for {chip.name}; it can be planned for, "
            "not rehearsed. --device cpu rehearses as on a CPU, and compares with the cluster."
        )
    if wanted and wanted != chip.device:
        raise HardwareError(f"--device {wanted}: the chips of {cluster.name} are of type {chip.device}.")
    return SimulatedDevice(chip.device, chip)


def _is_called(chip: Chip, name: str) -> bool:
    """Return True if a name is the chip's, or its first words: "h100" and "h100-sxm" are "H100 SXM"."""
    words, wanted = chip.name.lower().split(), name.lower().replace("-", " ").replace("_", " ").split()
    return words[: len(wanted)] == wanted or "".join(words) == "".join(wanted)


@contextmanager
def simulating(device: SimulatedDevice | None, deterministic: bool) -> Iterator[None]:
    """Let the program decide within the block as on a device; None for the CPU of this machine.

    Args:
        device: the device.
        deterministic: ``run.deterministic`` of the recipe.
    """
    with ExitStack() as stack:
        if device is not None:
            here = torch.device("cpu")
            stack.enter_context(simulated_backend(device.backend))
            stack.enter_context(computing_as_simulated(here))
            stack.enter_context(simulated_attention(here, deterministic))
            # Without a fused kernel torch's AdamW reads its step counters, which have no value here.
            stack.enter_context(patch.object(_ADAM, "_get_value", lambda step: 1.0))
        yield
