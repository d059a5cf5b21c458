"""Capabilities of a device type, and conservative answers for an accelerator that hlat does not know.

    the rest of hlat: "is there a fused AdamW here?" --> Backend --> a fact about torch on such devices

A backend states facts. The choice of a kernel, a dtype or a message is made where it is needed, from these facts: no
other code of hlat asks for the type of a device. Where a room has several kernels, it looks one up by the name that
the backend gives (``rounding_kernel``, ``document_kernel``).
"""

import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from hlat.runtime.backend.faults import HangLimits
from hlat.runtime.errors import LaunchError

TORCH, ONEDNN = "torch", "oneDNN"
"""Libraries of matrix products: that of torch's choice, and oneDNN, called for fp32 on some processors."""


@dataclass(frozen=True)
class Collectives:
    """The library that communicates between devices of a type."""

    name: str  # name of the backend in ``torch.distributed``
    # True if it works in threads of its own. They use the rendezvous store, even after Python has shut down, and
    # destroying a group waits for pending collectives, which a peer may never join.
    has_threads: bool = True
    # environment variable with the network interface to use; None if there is none
    interface_variable: str | None = None


@dataclass(frozen=True)
class Compiler:
    """The compiler that ``torch.compile`` runs for a device type."""

    language: str  # C or C++
    names: tuple[str, ...]  # programs to search for
    variable: str  # environment variable that names another one
    package: str  # package to install, for messages
    needs_headers: bool = False  # True if it needs Python's header files too

    def is_available(self) -> bool:
        """Return True if this machine has such a compiler, and Python.h if that is needed."""
        if self.needs_headers and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return False
        return self.find() is not None

    @property
    def missing(self) -> str:
        """Thing that ``is_available`` does not find, for messages."""
        return f"{self.language} compiler" if self.find() is None else "Python.h (package python3-dev)"

    def find(self) -> str | None:
        chosen = os.environ.get(self.variable)
        return next((name for name in ((chosen,) if chosen else self.names) if shutil.which(name) is not None), None)


@dataclass(frozen=True)
class AllocatorUse:
    """Memory that an allocator has taken from a device for one process."""

    reserved: int  # bytes at most, those of freed blocks included, which the allocator keeps
    retries: int  # times that it found no memory and gave back what it kept


@dataclass(frozen=True)
class DocumentKernel:
    """A kernel for attention that does not cross documents."""

    name: str  # its key in the table of ``hlat.model.document_attention``
    title: str  # name of the kernel in messages
    is_compiled: bool  # True if it can only run compiled


FLEX = DocumentKernel("flex", "flex_attention", is_compiled=True)
"""torch's flex attention. Uncompiled, it would build all scores."""


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of attention in training, as far as torch's choice of a kernel depends on them."""

    dtype: torch.dtype  # dtype of queries, keys and values
    head_dim: int  # elements of a head
    grouped: bool  # True if several query heads share a kv head
    limited: bool = False  # True if queries attend within documents or windows
    has_prefix: bool = False  # True if queries are the last positions of more keys (context parallelism)
    altered: bool = False  # True if attention is not softmax of scores alone: capped scores, sinks

    @property
    def is_16_bit(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionKernel:
    """The kernel that computes attention in training, forward and backward."""

    # of one of torch's kernels, a name of ``torch.nn.attention.SDPBackend`` in lower case; "math" keeps all scores
    name: str
    # True if torch's deterministic mode lets its backward pass add in a fixed order, which is slower
    slowed: bool = False

    @property
    def keeps_scores(self) -> bool:
        return self.name == "math"

    def __str__(self) -> str:
        return f"{self.name}, deterministic backward" if self.slowed else self.name


_FLEX_HAS_BACKWARD = ("xpu",)  # device types without a backend of their own


class Backend:
    """Capabilities of one device type. A subclass overrides what differs for its type."""

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
    scales_in_adamw: bool = False
    """True if that kernel scales the gradients to clip them, which rounds otherwise than a pass before it."""
    rounding_kernel: str = "torch"
    """Key of the AdamW kernel for bf16 weights, in the table of ``hlat.optim.adamw``; torch runs everywhere."""
    rounds_in_hardware: bool = False
    """True if the device can round every conversion to fewer bits stochastically."""
    materialises_masks: bool = False
    """True if attention with a mask of queries x keys builds it in memory."""
    group_before_device: bool = False
    """True if a process of several may use its device only after it has joined the default process group."""
    group_differs: bool = False
    """True if releases differ in what the process group can do, so that it is tried before training."""
    sends: bool = True
    """False if the process group of the known releases has no send and receive; a run asks its own group."""
    unequal_all_to_all: bool = True
    """True if an all-to-all may send each rank another number of elements."""
    deterministic_mode: bool = True
    """True if torch's deterministic mode is used; on some devices it turns fused execution off."""
    _slowed_attention: frozenset[str] = frozenset()
    """Names of attention kernels whose backward pass is slower in that mode."""
    compile_backend: str = "inductor"
    """Name of the compiler that ``torch.compile`` uses for the device."""
    compiler: Compiler | None = Compiler("C", ("gcc", "clang"), "CC", "gcc")
    """Program that ``torch.compile`` needs: Triton compiles its launchers in C. None if it needs no other program."""
    compile_cache: Mapping[str, str] = {"TORCHINDUCTOR_CACHE_DIR": "inductor"}
    """Environment variables that tell compilers the folder of compiled code: name of that folder in a cache."""
    compile_cache_per_rank: bool = False
    """True if processes that compile at once disturb each other in a common cache, so that each has its own."""
    float64: bool = False
    """True if torch computes in float64 on the device."""
    sums_norms_in_order: bool = False
    """True if torch's norm adds the squares of a complete tensor one after the other in fp32, with a large error."""
    has_integer_mv: bool = False
    """True if torch multiplies an int64 matrix by a vector."""
    rounds_embedding_gradients: bool = False
    """True if torch accumulates the gradient of an embedding in the dtype of its weight, even in bf16."""
    has_graphs: bool = False
    """True if the device repeats recorded work at the cost of one launch (``record``)."""
    packs_weights: bool = False
    """True if products by packed weights are faster for few rows (``hlat.evaluation.next_token``)."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type  # torch's name of the type

    def of_chip(self, vendor: str, capability: tuple[int, int] | None) -> "Backend":
        """Return a backend that answers as on a chip of the hardware catalog, for rehearsals."""
        return self

    # The device: presence, selection, waiting

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def select(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """Record work without doing it; return a function that repeats it.

        ``work`` must use the same memory each time, not wait for the device, and have been called before.
        """
        return work

    def is_initialized(self) -> bool:
        """Return True if this process has initialised the driver."""
        # A forked process could not use the driver's state.
        module = torch.get_device_module(self.device_type)
        return bool(getattr(module, "is_initialized", lambda: False)())

    def can_send(self, group: ProcessGroup) -> bool:
        """Return True if a process group has send and receive, which pipelines need."""
        # torch implements both; an accelerator's package that derives a group in Python may have neither.
        return type(group) is ProcessGroup or type(group).send is not ProcessGroup.send

    def group_refusal(self, ranks: Sequence[int]) -> str:
        """Return why ascending global ranks cannot form a process group, without a full stop; empty if they can."""
        return ""

    # Settings of a process

    def configure_process(self) -> None:
        """Make settings of the process that suit the device."""

    def configure_collectives(self, limits: HangLimits) -> None:
        """Let the library of collectives report hangs; to be called before the process joins others."""

    def configure_rounding(self, in_hardware: bool, seed: int) -> None:
        """Round stochastically in hardware, or check that it rounds to nearest; the seed is below 2^31.

        Raises:
            LaunchError: the device cannot, or the environment asks for the opposite.
        """
        if in_hardware:
            raise LaunchError(
                f"precision.rounding=hardware: {self.device_type} devices do not round stochastically. Use "
                "precision.rounding=software, which does so in the optimizer."
            )

    def configure_products(self, deterministic: bool) -> None:
        """Make matrix products accumulate in fp32, and give the same bits each time if asked to."""

    # Arithmetic

    def has_fast_bf16(self, device: torch.device) -> bool:
        """Return True if bf16 matrix products run in hardware on this device, rather than being emulated."""
        return True

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which hlat multiplies: float32 where bf16 would be emulated."""
        return dtype

    def product_format(self, dtype: torch.dtype) -> str:
        """Return the number format of products, as the hardware catalog names it, such as ``bfloat16`` or ``tf32``."""
        return str(dtype).removeprefix("torch.")

    def fp8_refusal(self, device: torch.device) -> str:
        """Return the reason why the device has no fp8 products, without a full stop; empty if it has them."""
        return f"torch has no fp8 products on a {self.device_type} device"

    def compile_refusal(self, compute: torch.dtype, flops: float, world: int, device: torch.device) -> str:
        """Return why compiling blocks does not pay for a run of ``flops``, dtype ``compute``; empty if it does."""
        return f"no known benefit on {self.device_type}; run.compile=blocks forces it"

    def compiler_versions(self, device: torch.device) -> dict[str, str]:
        """Return what compiled code depends on besides the program: versions of compilers and the device, by name."""
        return {
            "torch": str(torch.__version__),
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "device": self.describe(device),
        }

    def compile_obstacle(self, device: torch.device) -> str:
        """Return the reason why ``torch.compile`` cannot build kernels for a device; empty if it can."""
        return ""

    def attention_kernel(self, heads: AttentionHeads, deterministic: bool, device: torch.device) -> AttentionKernel:
        """Return the kernel of causal attention in training: one answer for runs, rehearsals and plans."""
        if heads.limited:
            kernel = self.document_kernel
            return AttentionKernel("none" if kernel is None else f"{kernel.title} within documents")
        # Of more keys than queries torch tries flash attention first, and never cuDNN, as in deterministic mode.
        ordered = (deterministic or heads.has_prefix) and self.deterministic_mode
        # torch itself is asked about a device that is here, a table about others.
        chosen = _torch_attention if device.type == self.device_type else self._expected_attention
        name = chosen(heads, ordered, device)
        return AttentionKernel(name, deterministic and name in self._slowed_attention)

    def _expected_attention(self, heads: AttentionHeads, deterministic: bool, device: torch.device) -> str:
        """Return the name of the kernel that torch chooses on such a device, which is not here."""
        return "math"

    def deterministic_by_default(self, heads: AttentionHeads, device: torch.device) -> bool:
        """Return the value of ``run.deterministic=auto``: False where True would take a slower kernel of attention."""
        return self.attention_kernel(heads, True, device) == self.attention_kernel(heads, False, device)

    @property
    def pointwise_kernels(self) -> str:
        """Key of the kernels of norms, RoPE, SwiGLU and loss, in the table of ``hlat.model.kernels``."""
        return TORCH

    @property
    def fp32_by_onednn(self) -> bool:
        """True if oneDNN computes fp32 products faster than the library that torch calls."""
        return False

    def product_libraries(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the libraries for training's products of a dtype from ``product_dtype``: keys of ``PRODUCTS``."""
        # Products of the head, of compiled blocks and of zero-bubble schedules are torch's in any case.
        return (TORCH, ONEDNN) if self.fp32_by_onednn and dtype == torch.float32 else (TORCH,)

    @property
    def fused_attention(self) -> bool:
        """True if causal attention has a compiled kernel of hlat's own (``hlat.model.kernels``)."""
        return False

    @property
    def document_kernel(self) -> DocumentKernel | None:
        """Kernel of attention within documents; None if there is none with a backward pass."""
        return FLEX if self.device_type in _FLEX_HAS_BACKWARD else None

    # Memory

    def memory_bytes(self, device: torch.device) -> int:
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)

    def free_memory_bytes(self, device: torch.device) -> int:
        """Bytes of the device's memory that no process uses."""
        return int(torch.accelerator.get_memory_info(device)[0])

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Largest number of bytes that this process has allocated on the device so far."""
        return int(torch.accelerator.max_memory_allocated(device))

    def allocator_use(self, device: torch.device) -> AllocatorUse | None:
        """Return what the allocator of this process has taken so far; None if it keeps no freed memory."""
        return None

    def pin_memory(self, memory: torch.Tensor, device: torch.device) -> bool:
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

    def instance_type(self, device: torch.device) -> str | None:
        """Return the cloud instance type, or its family, for chips without a name in torch; None if not needed."""
        return None

    def cores_per_device(self) -> int | None:
        """Cores of a chip that form one device, if the environment sets that; None for the catalog's number."""
        return None


def _torch_attention(heads: AttentionHeads, deterministic: bool, device: torch.device) -> str:
    """Return torch's choice on a device that is here. Verified on CPUs only."""
    from torch.nn.attention import SDPBackend, current_flash_attention_impl  # noqa: PLC0415 - most starts need neither

    q, k = (
        # The choice does not depend on batch and length: the smallest tensors that ask the question.
        torch.empty((1, count, 128, heads.head_dim), dtype=heads.dtype, device=device, requires_grad=True)
        for count in (1 + heads.grouped, 1)
    )
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    try:
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True))
    finally:
        torch.set_deterministic_debug_mode(before)
    name = chosen.name.lower()
    # FlashAttention 3 or 4, if the user has installed and activated it, replaces torch's own flash attention.
    other = current_flash_attention_impl() if chosen == SDPBackend.FLASH_ATTENTION else None
    return name if other is None else f"{name}_{other.lower().removeprefix('fa')}"
