"""Register the test device with torch: ``torch.device("neuron")``, ``torch.neuron`` and the backend of collectives.

load() --> device.so --> torch.neuron with the names of torch-neuronx --> torch.distributed backend "neuron"
"""

import ctypes
import json
import os
import sys
import types
from typing import Any

import torch

from tests.support.neuron.building import build
from tests.support.neuron.rules import RULES, holds

DEVICES_ENV = "HLAT_STAND_IN_DEVICES"
"""Number of devices of the machine; 64 unless set, as on a trn2.48xlarge."""

MEMORY_ENV = "HLAT_STAND_IN_MEMORY"
"""Bytes of a device, above which allocations fail; 24 GiB unless set."""

_OF_LIBRARY = ("float64", "unsigned", "determinism", "fork", "one-device")  # rules that the library applies
_native: list[ctypes.CDLL] = []
_assigned: list[int] = []  # the index of this process's device, once the default group has assigned it


def load() -> None:
    """Register the device; once per process."""
    if _native:
        return
    folder = build()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # its entry points
    torch.ops.load_library(str(folder / "device.so"))
    library = ctypes.CDLL(str(folder / "device.so"))
    library.stand_in_counts.restype = ctypes.c_char_p
    for name in ("stand_in_memory", "stand_in_peak_memory"):
        getattr(library, name).restype = ctypes.c_int64
    for rule in set(_OF_LIBRARY) & set(RULES):
        if not holds(rule):
            assert library.stand_in_allow(rule.encode()), rule
    library.stand_in_install(_visible_devices())
    library.stand_in_limit_memory(ctypes.c_int64(_Properties().total_memory))
    _native.append(library)
    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", _module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if torch.distributed.is_available():
        from tests.support.neuron.process_group import register  # noqa: PLC0415

        register()


def native() -> ctypes.CDLL:
    """Return the library."""
    return _native[0]


def counts() -> dict[str, Any]:
    """Return what happened on the device since the last call: operators, new shapes, waits of the host and more."""
    found: dict[str, Any] = json.loads(native().stand_in_counts())
    return found


def _visible_devices() -> int:
    cores = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
    if not cores:
        return int(os.environ.get(DEVICES_ENV, "64"))
    first, _, last = cores.partition("-")
    return int(last or first) - int(first) + 1


def assign_local_device() -> None:
    """Give this process the device of its local rank, as the first process group does, and start the runtime."""
    local_rank = int(os.environ["LOCAL_RANK"])
    os.environ.setdefault("NEURON_RT_VISIBLE_CORES", str(local_rank))
    assert _visible_devices() == 1, "neuron: more than one device per process"
    seen, index = (int(os.environ["LOCAL_WORLD_SIZE"]), local_rank) if holds("local-index") else (1, 0)
    native().stand_in_assign(seen, index)
    _assigned[:] = [index]


class _Properties:
    name = "trn2.48xlarge"

    @property
    def total_memory(self) -> int:
        return int(os.environ.get(MEMORY_ENV, str(24 << 30)))


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """Build torch.neuron with the names of the beta's module, as far as torch or hlat use them."""
    module = types.ModuleType("torch.neuron")
    generator = torch.default_generator

    def device_count() -> int:
        return library.stand_in_device_count() if _assigned else _visible_devices()

    def set_device(device: Any) -> None:
        torch._C._accelerator_setDeviceIndex(getattr(device, "index", device) or 0)

    def get_device_properties(device: Any = None) -> _Properties:
        torch.empty(1, device="neuron")  # reading the memory starts the runtime
        return _Properties()

    known: dict[str, Any] = {
        "is_available": lambda: device_count() > 0,
        "is_initialized": lambda: bool(library.stand_in_is_initialized()),
        "is_neuron_runtime_initialized": lambda: bool(library.stand_in_is_initialized()),
        "_is_in_bad_fork": lambda: bool(library.stand_in_is_in_bad_fork()),
        "_lazy_init": library.stand_in_start,
        "init": library.stand_in_start,
        "device_count": device_count,
        "current_device": library.stand_in_current_device,
        "set_device": set_device,
        "get_device_name": lambda device=0: str(device) if isinstance(device, torch.device) else f"neuron:{device}",
        "get_device_properties": get_device_properties,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: library.stand_in_memory(),
        "max_memory_allocated": lambda device=None: library.stand_in_peak_memory(),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float32, torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "Stream": torch.Stream,
        "Event": lambda **options: torch.Event("neuron", **options),
        "current_stream": lambda device=None: torch.Stream(device=device or "neuron"),
        "default_stream": lambda device=None: torch.Stream(device=device or "neuron"),
        "set_stream": lambda stream: None,
        "stream": _Within,
        "device": _Selected,
    }
    vars(module).update(known)
    sys.modules["torch.neuron"] = module
    return module


class _Within:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        return self._stream

    def __exit__(self, *error: object) -> None:
        return None


class _Selected:
    def __init__(self, device: Any) -> None:
        self._index = device if isinstance(device, int) else torch.device(device).index
        self._before = -1

    def __enter__(self) -> None:
        self._before = native().stand_in_current_device()
        if self._index not in (None, -1, self._before):
            torch._C._accelerator_setDeviceIndex(self._index)

    def __exit__(self, *error: object) -> None:
        if self._before != native().stand_in_current_device():
            torch._C._accelerator_setDeviceIndex(self._before)
