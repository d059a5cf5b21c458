"""The device: chosen once, and queried here for everything that depends on the backend.

No other module of hlat calls ``torch.cuda`` or its counterparts; they use ``torch.accelerator`` or this module.
"""

import os
import resource
import sys
from pathlib import Path

import torch

from hlat.runtime.errors import LaunchError
from hlat.runtime.rank_env import RankInfo


def choose_device(device: str, here: RankInfo) -> torch.device:
    """Choose the device of this process; with several accelerators on a machine, the one with the local rank as index.

    Args:
        device: a device type (cpu, cuda, neuron) or auto: the accelerator that torch finds, else the CPU.
        here: rank of this process.

    Raises:
        LaunchError: the requested type is not present on this machine, or there are fewer devices than processes.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    present = found.type if found is not None else "cpu"
    if device not in ("auto", "cpu", present):
        message = f"run.device={device}: torch finds no such device here, only {present}."
        raise LaunchError(f"{message} Use run.device=auto, or install a torch build for {device}.")
    chosen = present if device == "auto" else device
    if chosen == "cpu" or here.world == 1:
        return torch.device(chosen)
    count = torch.accelerator.device_count()
    # Some schedulers make only one device visible to each process: it has index 0 in every process.
    one_visible = count == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    index = 0 if one_visible else here.local_rank
    if index >= count:
        message = f"process {here.local_rank} of this machine has no {chosen} device of its own: there are {count}."
        raise LaunchError(f"{message} Start at most {count} processes per machine, or use run.device=cpu.")
    torch.accelerator.set_device_index(index)
    return torch.device(chosen, index)


_COMPILER_SETTINGS = "torch._inductor.config"


def configure_numerics(device: torch.device, deterministic: bool = True) -> None:
    """Make matrix products accumulate in fp32, and kernels deterministic.

    Args:
        device: device that the process computes on.
        deterministic: raise an error for kernels that are not deterministic. A warning would not be enough: torch
            would still use such a kernel for the backward pass of fused attention on CUDA.
    """
    if device.type == "cuda":
        # By default cuBLAS may accumulate partial sums of a 16-bit product in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if deterministic and device.type == "cuda":
        # cuBLAS needs a fixed workspace to give the same bits each time (PyTorch notes on reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms(True) does the same, but imports the compiler to configure it, which takes over a
    # second at each start. Here the compiler gets the setting from the environment, or directly if it is loaded.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1" if deterministic else "0"
    if _COMPILER_SETTINGS in sys.modules:
        sys.modules[_COMPILER_SETTINGS].deterministic = deterministic  # type: ignore[attr-defined]
    # Filling new memory finds reads of uninitialised data; it is not needed for reproducibility, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def nondeterministic_kernel_error(error: BaseException) -> LaunchError | None:
    """Return the error for the user if torch refused a non-deterministic kernel; None for any other error."""
    if not isinstance(error, RuntimeError) or "use_deterministic_algorithms" not in str(error):
        return None
    found = str(error).strip().splitlines()[0].partition(". ")[0]
    return LaunchError(
        f"run.deterministic=true allows only kernels that give the same bits each time, and torch has none: {found}. "
        "With run.deterministic=false the run uses another kernel; after a resume the last bits may differ."
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def accelerator_in_use() -> bool:
    """Return True if this process has initialized an accelerator; a forked process could not use the driver's state."""
    module = torch.get_device_module()
    return module is not torch.cpu and bool(getattr(module, "is_initialized", lambda: False)())


def pin_memory(memory: torch.Tensor, device: torch.device) -> bool:
    """Lock the pages of host memory, so that an accelerator can copy asynchronously; return False if it cannot."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # a new thread starts on device 0
        return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def unpin_memory(memory: torch.Tensor, device: torch.device) -> None:
    """Undo a successful ``pin_memory`` before the memory is freed."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far, in bytes: allocated on an accelerator, or resident in this process on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    status_file = Path("/proc/self/status")
    if status_file.is_file():
        # On Linux a child inherits getrusage's peak: a small process would report that of its launcher.
        status = status_file.read_text(encoding="ascii", errors="replace")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def describe_device(device: torch.device) -> str:
    """Return a readable name, such as ``cpu (2 threads)``."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device.type} ({name(device)})" if name is not None else device.type


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU: (8, 9) is Ada, (9, 0) Hopper."""
    return torch.cuda.get_device_capability(device)


_FIRST_WITH_BF16 = (8, 0)  # NVIDIA Ampere; AMD GPUs that torch supports report (9, 0) or more


def has_fast_bf16(device: torch.device) -> bool:
    """Return True if bf16 matrix products run in hardware on this device, rather than being emulated."""
    if device.type == "cuda":
        return compute_capability(device) >= _FIRST_WITH_BF16
    if device.type != "cpu":
        return True
    capabilities = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in capabilities)
