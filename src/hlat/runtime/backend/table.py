"""The table of accelerators: the one place in hlat that lists device types.

    device, or its type --backend_of--> Backend: capabilities of such devices (``base.py``)

To add an accelerator, write one module with a subclass of ``Backend`` and its instance ``BACKEND``, and add a line
here. ``run.device`` of a recipe then accepts the type, and everything that depends on a device asks the new backend. A
type that torch knows and this table does not, such as xpu, gets the conservative answers of ``Backend`` itself.

This module does not import torch, because recipes are checked without it.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hlat.runtime.backend.base import Backend

_HOST = "cpu"

BACKENDS = {
    # device type -> module whose ``BACKEND`` describes it
    "cpu": "hlat.runtime.backend.cpu",
    "cuda": "hlat.runtime.backend.cuda",
    "neuron": "hlat.runtime.backend.neuron",
}

DEVICE_FILES = {
    # device type -> files that the driver makes where there is such a device
    # NVIDIA, and its Jetson; AMD, whose torch says cuda too; the Linux of Windows
    "cuda": ("/dev/nvidia[0-9]*", "/dev/nvmap", "/dev/kfd", "/dev/dxg"),
    "neuron": ("/dev/neuron[0-9]*",),
}
"""For ``absent_device``; a type without an entry is taken to be present."""

OPENED_FILES = ("/dev/nvidia*", "/dev/nvmap", "/dev/kfd", "/dev/dri/*", "/dev/dxg", "/dev/neuron*")
"""Files that drivers keep open in a process: control files and those of memory, too. ``*`` stands for any path."""


OTHER_DEVICE_NAMES = {
    # what people write -> the device type that they mean
    "gpu": "cuda",
    "nvidia": "cuda",
    "trainium": "neuron",
    "trn": "neuron",
    "xla": "neuron",
}
"""For messages about ``run.device``."""


def absent_device(device: str) -> str:
    """Return why a device type (or auto) cannot be used here, as far as is known without torch; else ""."""
    patterns = DEVICE_FILES.get(device)
    if patterns is None or _simulated:
        return ""
    if any(glob(pattern) for pattern in patterns) or _torch_has(device):  # noqa: PTH207 - absolute patterns
        return ""
    return f"this machine has no {device} device: there is no {patterns[0]}."


def is_device_file(path: str) -> bool:
    """Return True if a driver of the table opens this path in processes which use its devices."""
    return any(fnmatchcase(path, pattern) for pattern in OPENED_FILES)


def _torch_has(device: str) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch  # noqa: PLC0415 - only where it is imported already

    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device


def expects_accelerator(device: str) -> bool:
    """Return True if ``run.device``, a type or auto, means an accelerator, as far as is known without torch."""
    if device == "auto":
        return any(not absent_device(known) for known in DEVICE_FILES)
    return device != _HOST


def backend_of(device: "torch.device | str") -> "Backend":
    """Return the backend of a device or type, one per process; within ``simulated_backend`` the simulated one."""
    if _simulated:
        return _simulated[-1]
    return _backend(device if isinstance(device, str) else device.type)


_simulated: list["Backend"] = []  # innermost last


@contextmanager
def simulated_backend(backend: "Backend") -> Iterator[None]:
    """Let one backend answer every question within the block, for rehearsals of a device that is not here."""
    _simulated.append(backend)
    try:
        yield
    finally:
        _simulated.pop()


def is_simulated() -> bool:
    """Return True within ``simulated_backend``."""
    return bool(_simulated)


@functools.cache
def _backend(device_type: str) -> "Backend":
    if device_type not in BACKENDS:
        unknown: Backend = import_module("hlat.runtime.backend.base").Backend(device_type)
        return unknown
    known: Backend = import_module(BACKENDS[device_type]).BACKEND
    return known


def types_with(capability: "Callable[[Backend], bool]") -> tuple[str, ...]:
    """Return the device types of the table that have a capability; False for ``Backend`` itself."""
    # For constants of modules that torch.compile traces: it reads a constant, but would trace backend_of, and check at
    # every call that nothing which it reads has changed.
    return tuple(device_type for device_type in BACKENDS if capability(backend_of(device_type)))


def interface_variables() -> tuple[str, ...]:
    """Return the environment variables that name the network interface of collective libraries."""
    libraries = (backend_of(device_type).collectives for device_type in BACKENDS)
    names = (library.interface_variable for library in libraries if library is not None)
    return tuple(name for name in names if name is not None)


DRIVER_FILES = {
    # device type -> file of the kernel (Linux) that names the version of a loaded driver
    "cuda": Path("/proc/driver/nvidia/version"),  # "NVRM version: NVIDIA UNIX ...  550.54.15  Tue ..."
    "neuron": Path("/sys/module/neuron/version"),  # "2.21.37.0"
}


def driver_versions() -> dict[str, str]:
    """Return the version of each accelerator's loaded driver, by device type; nothing is imported or initialised."""
    found = {}
    for device_type, file in DRIVER_FILES.items():
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # no such driver, or not Linux
            continue
        numbers = [word for line in lines[:1] for word in line.split() if word[0].isdigit() and "." in word]
        if numbers:
            found[device_type] = numbers[0]
    return found
