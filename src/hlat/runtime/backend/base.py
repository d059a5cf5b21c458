"""Capabilities of a device type, and conservative answers for an accelerator that hlat does not know.

    the rest of hlat: "is there a fused AdamW here?" --> Backend --> a fact about torch on such devices

A backend states facts. The choice of a kernel, a dtype or a message is made where it is needed, from these facts: no
other code of hlat asks for the type of a device. Where a room has several kernels, it looks one up by the name that
the backend gives (``rounding_kernel``, ``document_kernel``).
"""

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Collectives:
    """The library that communicates between devices of a type.

    Attributes:
        name: name of the backend in ``torch.distributed``.
        has_threads: True if it works in threads of its own. They use the rendezvous store, even after Python has shut
            down, and destroying a group waits for pending collectives, which a peer may never join.
        interface_variable: environment variable with the network interface to use; None if there is none.
    """

    name: str
    has_threads: bool = True
    interface_variable: str | None = None


@dataclass(frozen=True)
class Compiler:
    """The compiler that ``torch.compile`` runs for a device type.

    Attributes:
        language: C or C++.
        names: programs to search for.
        variable: environment variable that names another one.
        package: package to install, for messages.
        needs_headers: True if it needs Python's header files too.
    """

    language: str
    names: tuple[str, ...]
    variable: str
    package: str
    needs_headers: bool = False

    def is_available(self) -> bool:
        """Return True if this machine has such a compiler, and the header files if they are needed."""
        if self.needs_headers and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return False
        chosen = os.environ.get(self.variable)
        return any(shutil.which(name) is not None for name in ((chosen,) if chosen else self.names))


@dataclass(frozen=True)
class DocumentKernel:
    """A kernel of attention within documents.

    Attributes:
        name: its key in the table of ``hlat.model.document_mask``.
        title: name of the kernel in messages.
        is_compiled: True if it can only run compiled.
    """

    name: str
    title: str
    is_compiled: bool


FLEX = DocumentKernel("flex", "flex_attention", is_compiled=True)
"""torch's flex attention. Uncompiled, it would build all scores."""

_FLEX_HAS_BACKWARD = ("xpu",)  # device types without a backend of their own


class Backend:
    """Capabilities of one device type. A subclass overrides what differs for its type.

    Attributes:
        device_type: name of the type in torch.
    """

    collectives: Collectives | None = None
    """Library for collectives between devices of this type; None if torch has none, which leaves one process."""
    visible_devices_variable: str | None = None
    """Environment variable with which a scheduler makes only some devices visible to a process."""
    is_everywhere: bool = False
    """True if every machine has such a device."""
    is_shared: bool = False
    """True if any number of processes may use the same device."""
    uses_host_threads: bool = False
    """True if the device computes on the threads that ``torch.get_num_threads`` counts."""
    pins_memory: bool = False
    """True if the device copies from page-locked host memory asynchronously."""
    fused_adamw: bool = False
    """True if torch's AdamW has a fused kernel."""
    rounding_kernel: str = "torch"
    """Key of the AdamW kernel for bf16 weights, in the table of ``hlat.optim.adamw_bf16``; torch runs everywhere."""
    materialises_masks: bool = False
    """True if attention with a mask of queries x keys builds it in memory."""
    compiler: Compiler = Compiler("C", ("gcc", "clang", "cc"), "CC", "gcc")
    """Compiler that ``torch.compile`` needs: Triton compiles its launchers in C."""
    float64: bool = False
    """True if torch computes in float64 on the device."""
    sums_norms_in_order: bool = False
    """True if torch's norm adds the squares of a complete tensor one after the other in fp32, with a large error."""
    has_integer_mv: bool = False
    """True if torch multiplies an int64 matrix by a vector."""
    rounds_embedding_gradients: bool = False
    """True if torch accumulates the gradient of an embedding in the dtype of its weight, even in bf16."""

    def __init__(self, device_type: str) -> None:
        """Describe a device type.

        Args:
            device_type: name of the type in torch.
        """
        self.device_type = device_type

    # The device: presence, selection, waiting

    def device_count(self) -> int:
        """Number of devices that this process sees."""
        return torch.accelerator.device_count()

    def select(self, device: torch.device) -> None:
        """Make a device the current one of this thread."""
        torch.accelerator.set_device_index(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all queued work."""
        torch.accelerator.synchronize(device)

    def is_initialized(self) -> bool:
        """Return True if this process has initialised the driver, whose state a forked process could not use."""
        module = torch.get_device_module(self.device_type)
        return bool(getattr(module, "is_initialized", lambda: False)())

    def can_send(self, group: ProcessGroup) -> bool:
        """Return True if a process group has send and receive, which pipelines need.

        A group that torch implements has them. One that an accelerator's package implements in Python may have none.
        """
        return type(group) is ProcessGroup or type(group).send is not ProcessGroup.send

    # Settings of a process

    def configure_process(self) -> None:
        """Make settings of the process that suit the device."""

    def configure_products(self, deterministic: bool) -> None:
        """Make matrix products accumulate in fp32, and give the same bits each time if asked to."""

    # Arithmetic

    def has_fast_bf16(self, device: torch.device) -> bool:
        """Return True if bf16 matrix products run in hardware on this device, rather than being emulated."""
        return True

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which hlat multiplies operands of a dtype: float32 where bf16 would be emulated."""
        return dtype

    def product_format(self, dtype: torch.dtype) -> str:
        """Return the number format of products, as the hardware catalog names it, such as ``bfloat16`` or ``tf32``."""
        return str(dtype).removeprefix("torch.")

    def fp8_refusal(self, device: torch.device) -> str:
        """Return the reason why the device has no fp8 products, without a full stop; empty if it has them."""
        return f"torch has no fp8 products on a {self.device_type} device"

    def compile_refusal(self, compute: torch.dtype, flops: float, world: int) -> str:
        """Return the reason why compiling blocks does not pay by default; empty if it does.

        Args:
            compute: dtype of matrix products.
            flops: FLOPs of the whole run.
            world: number of processes.
        """
        return f"no known benefit on {self.device_type}; run.compile=blocks forces it"

    @property
    def document_kernel(self) -> DocumentKernel | None:
        """Kernel of attention within documents; None if there is none with a backward pass."""
        return FLEX if self.device_type in _FLEX_HAS_BACKWARD else None

    # Memory

    def memory_bytes(self, device: torch.device) -> int:
        """Memory of the device, in bytes."""
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)

    def free_memory_bytes(self, device: torch.device) -> int:
        """Memory of the device that no process uses, in bytes."""
        return int(torch.accelerator.get_memory_info(device)[0])

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Peak memory that this process has allocated on the device so far, in bytes."""
        return int(torch.accelerator.max_memory_allocated(device))

    def pin_memory(self, memory: torch.Tensor, device: torch.device) -> bool:
        """Lock the pages of host memory, so that the device copies asynchronously; return False if it cannot."""
        return False

    def unpin_memory(self, memory: torch.Tensor, device: torch.device) -> None:
        """Undo a successful ``pin_memory`` before the memory is freed."""

    # Identity, for messages and the hardware catalog

    def describe(self, device: torch.device) -> str:
        """Return a readable name, such as ``cuda (NVIDIA H200)``."""
        name = self.chip_name(device)
        return self.device_type if name is None else f"{self.device_type} ({name})"

    def chip_name(self, device: torch.device) -> str | None:
        """Return the name that torch gives to the chip; None if torch has no names for such devices."""
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        return None if name is None else str(name(device))

    def software(self) -> dict[str, str]:
        """Return versions of the driver and of libraries below torch, by name; empty if none are known."""
        return {}

    def instance_type(self) -> str | None:
        """Return the cloud instance type, for chips that have no name in torch; None if it is not needed."""
        return None

    def cores_per_device(self) -> int | None:
        """Cores of a chip that form one device, if the environment sets that; None for the catalog's number."""
        return None
