"""AWS Trainium through TorchNeuron, which registers the device type neuron and a process group of that name.

Not verified on a device (docs/limits.md). Facts are those of AWS's documentation and of the public beta's source
(SDK 2.33): no float64, eager operations without fused AdamW, no flex attention, and send and receive only in some
releases, so the process group is asked (``Backend.can_send``).
"""

import os
from pathlib import Path

import torch

from hlat.runtime.backend.base import Backend, Collectives

# The hypervisor of EC2 writes the instance type here; Neuron devices report no chip name of their own.
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")

DRIVER = Path("/sys/module/neuron/version")


class NeuronBackend(Backend):
    """Logical cores of Trainium chips."""

    collectives = Collectives("neuron")
    visible_devices_variable = "NEURON_RT_VISIBLE_CORES"

    def is_initialized(self) -> bool:
        """Return True if this process has started the Neuron runtime, under any of its names for the question."""
        module = torch.get_device_module(self.device_type)
        names = ("is_neuron_runtime_initialized", "is_initialized")
        return any(bool(getattr(module, name, lambda: False)()) for name in names)

    def instance_type(self) -> str | None:
        """Return the EC2 instance type; empty elsewhere."""
        try:
            return PRODUCT_NAME.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def software(self) -> dict[str, str]:
        """Return the version of the driver."""
        try:
            return {"driver": DRIVER.read_text(encoding="utf-8").strip()}
        except (OSError, UnicodeDecodeError):
            return {}

    def cores_per_device(self) -> int | None:
        """Physical cores of a logical core, if NEURON_LOGICAL_NC_CONFIG sets them."""
        configured = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "")
        return int(configured) if configured.isdecimal() and int(configured) > 0 else None


BACKEND = NeuronBackend("neuron")
