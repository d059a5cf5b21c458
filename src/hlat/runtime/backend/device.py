"""The device of a process: chosen and configured once, queries that need the device only, and its matrix products.

    run.device --find_device_type--> device type --configure_numerics--> settings of torch
                                                 --select_device(local rank)--> device of this process
    a caller that is not hlat --restored_settings--> its own settings and environment again, at the end of the block

``Backend.product_libraries`` says which libraries multiply matrices on a device; ``hlat.model`` chooses one for each
product in training, and the peak of a device is measured with all of them, so that utilization is a share of the best.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hlat.runtime.backend.base import ONEDNN, TORCH
from hlat.runtime.backend.faults import find_fault
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import HlatError, LaunchError, causes
from hlat.runtime.process import RankInfo
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV
from hlat.runtime.terminal import plural

_HOST = "cpu"
_SHOWN = 300  # characters of a message of a device's software


def choose_device(device: str, here: RankInfo) -> torch.device:
    """Choose the device of this process: ``find_device_type``, then ``select_device``, with their errors."""
    return select_device(find_device_type(device), here)


def find_device_type(device: str) -> str:
    """Return a device type for ``run.device``: a type, or auto. No device is used.

    Raises:
        LaunchError: the requested type is not present on this machine.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    present = found.type if found is not None else _HOST
    chosen = present if device == "auto" else device
    backend = backend_of(chosen)
    if chosen != present and not backend.is_everywhere:
        message = f"run.device={device}: torch finds no such device here, only {present}."
        raise LaunchError(f"{message} Use run.device=auto, or install a torch build for {device}.")
    return chosen


def select_device(device_type: str, here: RankInfo) -> torch.device:
    """Select the device of this process in this thread: the one with the local rank as index.

    Raises:
        LaunchError: there are fewer devices than processes.
    """
    backend = backend_of(device_type)
    if backend.is_shared or here.world == 1:
        return torch.device(device_type)
    count = backend.device_count()
    # Some schedulers make only one device visible to each process: it has index 0 in every process.
    one_visible = count == 1 and bool(os.environ.get(backend.visible_devices_variable or ""))
    index = 0 if one_visible else here.local_rank
    if index >= count:
        message = (
            f"process {here.local_rank} of this machine has no {device_type} device of its own: there are {count}."
        )
        raise LaunchError(f"{message} Start at most {plural(count, 'process')} per machine, or use run.device=cpu.")
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


_COMPILER_SETTINGS = "torch._inductor.config"


def configure_numerics(device: torch.device | str, deterministic: bool = True) -> None:
    """Make products accumulate in fp32, and raise an error for kernels that are not deterministic if asked to."""
    backend = backend_of(device)
    backend.configure_products(deterministic)
    # use_deterministic_algorithms(True) does the same, but imports the compiler to configure it, which takes over a
    # second at each start. Here the compiler gets the setting from the environment, or directly if it is loaded.
    if backend.deterministic_mode:
        # A warning is not enough: torch would still use such a kernel in the backward pass of fused attention on CUDA.
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1" if deterministic else "0"
    if _COMPILER_SETTINGS in sys.modules:
        sys.modules[_COMPILER_SETTINGS].deterministic = deterministic  # type: ignore[attr-defined]
    # Filling new memory finds reads of uninitialised data; it is not needed for reproducibility, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def nondeterministic_kernel_error(error: BaseException) -> LaunchError | None:
    """Return the error for the user if torch refused a non-deterministic kernel; else None."""
    if not isinstance(error, RuntimeError) or "use_deterministic_algorithms" not in str(error):
        return None
    found = str(error).strip().splitlines()[0].partition(". ")[0]
    return LaunchError(
        f"run.deterministic=true allows only kernels that give the same bits each time, and torch has none: {found}. "
        "With run.deterministic=false the run uses another kernel; after a resume the last bits may differ."
    )


def recurring_fault_error(error: BaseException) -> LaunchError | None:
    """Return the error for the user if a device's software reports what would fail again; else None."""
    fault = find_fault(str(error))
    if fault is None or not fault.recurs:
        return None
    line = next((line.strip() for line in str(error).splitlines() if find_fault(line) == fault), "")
    found = LaunchError(f"{fault} The device's software says: {line[:_SHOWN]}")
    # Processes of an attempt that trained may still hold a device's memory: then it is worth another try.
    found.retryable = EARLIER_ATTEMPT_ENV in os.environ
    return found


def device_error(error: BaseException) -> LaunchError | None:
    """Return the error for the user if torch or a device refuses what it would refuse again; else None."""
    if isinstance(error, HlatError):
        return None
    *_, error = causes(error)
    return nondeterministic_kernel_error(error) or recurring_fault_error(error)


def accelerator_in_use() -> bool:
    """Return True if this process has initialized an accelerator: it can no longer be forked."""
    built_for = torch.accelerator.current_accelerator()
    return built_for is not None and backend_of(built_for).is_initialized()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    backend_of(device).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far, in bytes: allocated on an accelerator, or resident in this process on the CPU."""
    return backend_of(device).peak_memory_bytes(device)


def has_fast_bf16(device: torch.device) -> bool:
    """Return True if bf16 matrix products run in hardware on this device, rather than being emulated."""
    return backend_of(device).has_fast_bf16(device)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is in host memory, where Python can read it."""
    return tensor.device.type == _HOST


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` in fp32 on a CPU: (..., in), (out, in), (out,); views may be transposed."""
    # torch itself calls this operator for packed weights only.
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    TORCH: torch.nn.functional.linear,
    ONEDNN: linear_by_onednn,
}
"""Functions of x (rows, in) and weight (out, in) that compute ``x @ weight.T``, by library."""


_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore the environment and torch's settings that ``join_run`` changes at the end of the block."""
    # One setting stays: on Linux, malloc keeps freed memory from the first run on.
    environment = dict(os.environ)
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    matmul = torch.backends.cuda.matmul
    reductions = {name: getattr(matmul, name) for name in _REDUCTIONS}
    compiler = sys.modules.get(_COMPILER_SETTINGS)
    deterministic = getattr(compiler, "deterministic", None)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        for name, value in reductions.items():
            setattr(matmul, name, value)
        if (compiler := sys.modules.get(_COMPILER_SETTINGS)) is not None:
            compiler.deterministic = bool(deterministic)  # type: ignore[attr-defined]
