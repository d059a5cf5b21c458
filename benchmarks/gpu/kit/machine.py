"""Facts about the machine, and its ceilings: what every other number is judged by.

nvidia-smi, files, variables --> facts;  import of torch, of hlat --> versions;  copies, products --> ceilings
"""

import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kit import nvidia_smi
from kit.child import Context

_PACKAGES = (  # those that hlat needs, and kernels that it might use
    *("torch", "triton", "numpy", "pyarrow", "fsspec", "pyyaml", "rich", "typer", "safetensors", "tokenizers"),
    *("pydantic", "pydantic-core", "torchao", "hlat", "transformers", "psutil"),
    *("liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4", "transformer-engine", "xformers"),
    *("cut-cross-entropy", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas"),
)
_VARIABLES = (
    "CUDA",
    "NVIDIA",
    "NCCL",
    "TORCH",
    "PYTORCH",
    "TRITON",
    "LD_",
    "OMP",
    "CUBLAS",
    "HOME",
    "PATH",
    "CC",
    "CXX",
)
_COPY_BYTES = 4 << 30
_MATRIX = 8192
_REPEATS = 10


def run(context: Context) -> None:
    """Collect facts, the cheapest and safest first."""
    with context.part("system"):
        context.found(system())
    with context.part("torch"):
        context.found(torch_facts(context.device))
        context.check("torch sees the device", context.numbers["device available"] is True)
    with context.part("hlat"):
        import hlat

        context.found({"hlat": hlat.__version__, "hlat file": hlat.__file__})
        from hlat.runtime.backend.table import backend_of

        compiler = backend_of(context.device).compiler
        context.found({"compiler available": None if compiler is None else compiler.is_available()})
    if context.numbers.get("device available"):
        with context.part("copies"):
            context.found(copies(context))
        with context.part("products"):
            context.found(products(context))


def system() -> dict[str, Any]:
    """Return facts that need no import and no device."""
    disks = {str(path): _disk(path) for path in ("/tmp", "/dev/shm", os.environ.get("OUT", "/tmp"))}
    return {
        "nvidia-smi": nvidia_smi.facts(),
        "nvidia-smi used MiB": nvidia_smi.used_mib(),
        "nvidia-smi as it prints": nvidia_smi.ask()[:3000],
        "python": sys.version,
        "executable": sys.executable,
        "kernel": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": _lines("/proc/meminfo", 3),
        "shared memory and disks, GiB free": disks,
        "user": os.getuid(),
        "limits": _lines("/proc/self/limits", 20),
        "programs": {name: shutil.which(name) for name in ("gcc", "cc", "clang", "g++", "nvcc", "ncu", "nvidia-smi")},
        "gcc": _output("gcc", "--version"),
        "Python.h": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        "packages": packages(),
        "variables": {name: value[:300] for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "nvidia devices": sorted(str(path) for path in Path("/dev").glob("nvidia*"))[:20],
    }


def torch_facts(device: str) -> dict[str, Any]:
    """Return versions of torch and its libraries, and what it says of the device."""
    began = time.monotonic()
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "seconds to import torch": time.monotonic() - began}
    present = torch.accelerator.current_accelerator(check_available=True)
    available = device == "cpu" or (present is not None and present.type == device)
    found |= {"device available": available, "cuda": str(torch.version.cuda), "cudnn": torch.backends.cudnn.version()}
    found |= {"threads": torch.get_num_threads(), "device name": ""}
    if device == "cpu" or not available:
        return found
    module = torch.get_device_module(device)
    began = time.monotonic()
    torch.ones(1, device=device)
    found["seconds of the first tensor"] = time.monotonic() - began
    properties = module.get_device_properties(0)
    found |= {"device name": module.get_device_name(0), "device": str(properties)}
    found |= {"memory GiB": properties.total_memory / 2**30, "devices": torch.accelerator.device_count()}
    nccl = getattr(getattr(module, "nccl", None), "version", lambda: None)
    attention = [name for name in dir(torch.nn.attention) if "impl" in name or "varlen" in name]
    return found | {"nccl": str(nccl()), "torch.nn.attention": attention}


def copies(context: Context) -> dict[str, float]:
    """Measure copies within the device, and to and from page-locked and other memory, in GB/s."""
    import torch

    from hlat.runtime.backend.table import backend_of

    size = (64 << 20) if context.tiny else _COPY_BYTES
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    found = {"copy_gb_per_second": 2 * size / _seconds(lambda: target.copy_(source), context) / 1e9}
    host = torch.zeros(size // 4, dtype=torch.uint8)  # every page exists before it is locked
    part = source[: size // 4]
    found["to_unpinned_gb_per_second"] = host.nbytes / _seconds(lambda: host.copy_(part), context) / 1e9
    backend, began = backend_of(context.device), time.perf_counter()
    is_pinned = backend.pin_memory(host, source.device)
    found |= {"pinned": is_pinned, "pin_gb_per_second": host.nbytes / (time.perf_counter() - began) / 1e9}
    found["to_pinned_gb_per_second"] = (
        host.nbytes / _seconds(lambda: host.copy_(part, non_blocking=True), context) / 1e9
    )
    found["from_pinned_gb_per_second"] = (
        host.nbytes / _seconds(lambda: part.copy_(host, non_blocking=True), context) / 1e9
    )
    if is_pinned:
        backend.unpin_memory(host, source.device)
    return found


def products(context: Context) -> dict[str, float]:
    """Measure products of large matrices of random numbers: bf16, fp32 as hlat sets it, in TFLOP/s."""
    import torch

    from hlat.runtime.backend.device import configure_numerics

    configure_numerics(context.device, deterministic=False)
    size, found = (256 if context.tiny else _MATRIX), {}
    for name, dtype in (("bf16_tflops", torch.bfloat16), ("fp32_tflops", torch.float32)):
        left, right = (torch.randn(size, size, device=context.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        found[name] = 2 * size**3 / _seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), context) / 1e12
    return found


def _seconds(work: Callable[[], object], context: Context) -> float:
    """Return the median time of some calls, each waited for."""
    import torch

    from hlat.runtime.backend.device import synchronize

    device, seconds = torch.device(context.device), []
    for number in range(3 + (2 if context.tiny else _REPEATS)):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds += [time.perf_counter() - began] if number > 2 else []
    return statistics.median(seconds)


def packages() -> dict[str, str]:
    """Return the versions of packages that matter, as far as they are installed; the first on the path counts."""
    found: dict[str, str] = {}
    for each in distributions():
        name = str(each.metadata["Name"] or "").lower().replace("_", "-")
        if name in _PACKAGES and name not in found:
            found[name] = each.version
    return found


def _disk(path: str) -> float | None:
    try:
        return round(shutil.disk_usage(path).free / 2**30, 1)
    except OSError:
        return None


def _lines(path: str, count: int) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()[:count]
    except OSError:
        return []


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout or done.stderr).partition("\n")[0]
