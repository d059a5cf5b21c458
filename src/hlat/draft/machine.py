"""The machine that a recipe is drafted for: its devices, and the FLOP/s that training reaches on them.

torch -> device type, number, peak -> assumed rate of training
"""

from dataclasses import dataclass

import torch

from hlat.hardware import peak_flops
from hlat.runtime.backend.device import choose_device, has_fast_bf16
from hlat.runtime.backend.table import backend_of
from hlat.runtime.rank_env import RankInfo

REACHED = 0.35
"""Assumed share of the peak that a step reaches: of measured products on a CPU, of the published peak elsewhere.

Published runs of dense models on accelerators reach 0.3 to 0.55 (docs/planning.md); hlat's own step on CPUs reached 0.3
to 0.7 of measured products (docs/notebook/results.md).
"""


@dataclass(frozen=True)
class Machine:
    """Devices of this machine.

    Attributes:
        kind: device type, as ``run.device`` takes it.
        name: name of a device, for people.
        devices: number of processes that a run starts here: 1 on a CPU.
        peak: FLOP/s of one device in the dtype of ``precision.mode: auto``.
        memory_bytes: memory of one device.
        bf16: True if ``auto`` computes in bf16.
        is_host: True for the CPU, whose memory holds everything else too.
    """

    kind: str
    name: str
    devices: int
    peak: float
    memory_bytes: int
    bf16: bool
    is_host: bool

    @property
    def rate(self) -> float:
        """FLOP/s that training is assumed to reach on all devices together."""
        return REACHED * self.peak * self.devices


def look_at_machine(device: str = "auto") -> Machine:
    """Look at this machine; on a CPU its products are measured for less than a second.

    Args:
        device: as for ``run.device``.

    Raises:
        LaunchError: there is no such device.
    """
    chosen = choose_device(device, RankInfo())
    backend = backend_of(chosen)
    bf16 = has_fast_bf16(chosen)
    peak = peak_flops(chosen, torch.bfloat16 if bf16 else torch.float32)
    devices = 1 if backend.is_shared else backend.device_count()
    memory = backend.memory_bytes(chosen)
    return Machine(chosen.type, backend.describe(chosen), devices, peak.value, memory, bf16, backend.is_shared)
