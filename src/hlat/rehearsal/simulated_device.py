"""A device that a rehearsal takes the decisions of, though it is not here: its type, its chip, its attention.

    "neuron", "cuda:h100", or the chip of a cluster --> SimulatedDevice --simulating--> the program decides as there
    recipe, world size, backend of the device --> the functions that training asks --> Decision(name, choice, reason)
    F.scaled_dot_product_attention(q, k, v, mask) --> the backend's kernel for such heads --> its operator, as torch
        dispatches it on the device: what it returns and keeps for backward is counted like every other tensor

    kernel                keeps for backward, besides queries, keys, values and output
    flash_attention       log-sum-exp
    cudnn_attention       log-sum-exp
    efficient_attention   log-sum-exp
    overrideable          log-sum-exp, and a mask if there is one
    math                  the scores after softmax, and keys and values repeated for every query head

Tensors keep reporting a CPU. Simulated are the answers of the device's backend (``hlat.runtime.backend``), and the
operators of attention. Torch implements a causal mask whose queries are the last of more keys (``CausalBias``, under
context parallelism) in flash and efficient attention only; for others it builds the mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from hlat.config import Recipe
from hlat.hardware import Catalog, Chip, Cluster
from hlat.model import attention_kernel, builds_masks, computing_as_simulated, recipe_heads
from hlat.optim import optimizer_spec
from hlat.parallel import decide_compilation
from hlat.precision import MODES
from hlat.runtime.backend import torch_private
from hlat.runtime.backend.base import AttentionHeads, Backend
from hlat.runtime.backend.table import BACKENDS, backend_of, simulated_backend
from hlat.runtime.errors import HardwareError

_aten = torch.ops.aten
_plain = F.scaled_dot_product_attention
_LOWER_RIGHT = 2  # value of torch.nn.attention.bias.CausalVariant


@contextmanager
def simulated_attention(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Let attention run the operator of the simulated device within the block, backward passes included.

    ``device`` is the one that the tensors report.
    """

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: CausalBias | None = None, **given: bool
    ) -> torch.Tensor:
        heads = AttentionHeads(q.dtype, q.shape[3], q.shape[1] != k.shape[1], has_prefix=attn_mask is not None)
        kernel = backend_of(device).attention_kernel(heads, deterministic, device)
        return _KERNELS[kernel.name](q, k, v, attn_mask)

    # Torch 2.11 has no shapes for the backward operator of this kind of attention.
    torch_private.shapes_of_overrideable_backward()
    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    if mask is None:
        out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
        return out
    by_position = (tensor.transpose(1, 2) for tensor in (q, k, v))
    lengths = (None,) * 5  # bias, cumulative and maximal lengths of packed rows
    found: torch.Tensor = _aten._efficient_attention_forward(
        *by_position, *lengths, 0.0, _LOWER_RIGHT, compute_log_sumexp=True
    )[0]
    return found.transpose(1, 2)


def _overrideable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    bias = None if mask is None else _bias(mask, q)
    out: torch.Tensor = _aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias, 0.0, mask is None)[0]
    return out


def _bias(mask: CausalBias, q: torch.Tensor) -> torch.Tensor:
    """Build a mask as torch does: of booleans, then as numbers that are added to the scores, for every head."""
    allowed = mask._materialize(q.device)
    numbers = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
    return numbers.expand(*q.shape[:2], *numbers.shape)


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    allowed = None if mask is None else mask._materialize(q.device)
    with sdpa_kernel(SDPBackend.MATH):
        return _plain(q, k, v, attn_mask=allowed, is_causal=mask is None, enable_gqa=True)


_KERNELS: dict[str, Callable[[Any, Any, Any, CausalBias | None], torch.Tensor]] = {
    # name of a backend's kernel -> the operator that torch runs for it
    "flash_attention": lambda q, k, v, mask: _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
    "cudnn_attention": lambda q, k, v, mask: _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[
        0
    ],
    "efficient_attention": _efficient,
    "overrideable": _overrideable,
    "math": _math,
}


_GIB = 1 << 30
_ADAM = import_module("torch.optim.adam")  # torch.optim has deleted the name


@dataclass(frozen=True)
class SimulatedDevice:
    """A device type and a chip of the hardware catalog."""

    device_type: str  # of torch
    chip: Chip

    @property
    def backend(self) -> Backend:
        return backend_of(self.device_type).of_chip(self.chip.vendor, self.chip.capability)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one torch device of the chip; None if the catalog does not have it."""
        return None if self.chip.memory is None else int(self.chip.memory.gib * _GIB / self.chip.devices)

    def __str__(self) -> str:
        capability = self.chip.capability
        number = "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
        return f"{self.device_type} ({self.chip.name}{number})"


def parse_device(text: str | None, cluster: Cluster | None, catalog: Catalog) -> SimulatedDevice | None:
    """Find the device that a rehearsal is to simulate: TYPE or TYPE:CHIP, as in "cuda:h100"; None for the cluster's.

    Returns None for the CPU of this machine, which needs no simulation.

    Raises:
        HardwareError: no such device type or chip; or the chip is of another type.
    """
    if text is None and cluster is None:
        return None
    wanted, _, name = (text or "").partition(":")
    if text is not None and wanted not in BACKENDS:
        raise HardwareError(f"--device {text}: no device type {wanted!r}; write {', '.join(BACKENDS)}, or cuda:h100.")
    # A CPU is here: nothing is to be simulated.
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
    """True if a name is the chip's, or its first words: "h100" and "h100-sxm" are "H100 SXM"."""
    words, wanted = chip.name.lower().split(), name.lower().replace("-", " ").replace("_", " ").split()
    return words[: len(wanted)] == wanted or "".join(words) == "".join(wanted)


@contextmanager
def simulating(device: SimulatedDevice | None, deterministic: bool) -> Iterator[None]:
    """Let the program decide within the block as on a device; None for the CPU of this machine."""
    if device is None:
        yield
        return
    here = torch.device("cpu")
    # Without a fused kernel torch's AdamW reads its step counters, which have no value here.
    backend, steps = simulated_backend(device.backend), patch.object(_ADAM, "_get_value", lambda step: 1.0)
    with backend, computing_as_simulated(here), simulated_attention(here, deterministic), steps:
        yield


@dataclass(frozen=True)
class Decision:
    """One choice that a run makes on its device."""

    name: str  # subject
    choice: str
    reason: str = ""  # explanation or consequence; may be empty


def decide(recipe: Recipe, world: int, device: torch.device) -> list[Decision]:
    """Take the decisions of a run, with a resolved precision mode, on a device, which may be simulated."""
    return [
        *_arithmetic_decisions(recipe, device),
        *_attention_decisions(recipe, device),
        *_execution_decisions(recipe, world, device),
        *_process_decisions(world, device),
    ]


def _arithmetic_decisions(recipe: Recipe, device: torch.device) -> Iterator[Decision]:
    backend, mode = backend_of(device), MODES[recipe.precision.mode]
    products = backend.product_dtype(mode.compute)
    emulated = mode.compute == torch.bfloat16 and not backend.has_fast_bf16(device)
    note = "emulated: slower than fp32" if emulated and products == mode.compute else "accumulated in fp32"
    yield Decision("precision", recipe.precision.mode, f"weights {_name(mode.weights)}, moments {_name(mode.moments)}")
    yield Decision("products", backend.product_format(products), note)
    yield Decision("optimizer", optimizer_spec(recipe.optimizer, recipe.precision.mode).kernel(device))
    yield Decision("rounding", recipe.precision.rounding)
    wide = "on the device, in float64" if backend.float64 else "on the host: the device has no float64"
    yield Decision("bias corrections of bf16 AdamW", wide)
    embedding = mode.weights == torch.bfloat16 and backend.rounds_embedding_gradients
    yield Decision("gradient of the embedding", "summed in fp32 by hlat" if embedding else "by torch's kernel")


def _attention_decisions(recipe: Recipe, device: torch.device) -> Iterator[Decision]:
    kernel = attention_kernel(recipe_heads(recipe), recipe.run.determinism is not False, device)
    kept = "keeps the scores of all pairs of positions" if kernel.keeps_scores else "keeps no scores"
    yield Decision("attention", str(kernel), kept)
    if recipe.parallel.context > 1:
        built = "built, chunk x prefix per layer" if builds_masks(device) else "none: the kernel aligns them"
        yield Decision("masks of context parallelism", built)


def _execution_decisions(recipe: Recipe, world: int, device: torch.device) -> Iterator[Decision]:
    backend = backend_of(device)
    compilation = decide_compilation(recipe, device, world)
    choice = f"compiled by {backend.compile_backend}" if compilation.on else "eager"
    yield Decision("blocks", choice, compilation.reason or "counted here as eager ones, which keep more")
    mode = "on" if recipe.run.deterministic and backend.deterministic_mode else "off"
    asked = "it turns fused execution off" if recipe.run.deterministic and mode == "off" else ""
    yield Decision("torch's deterministic mode", mode, asked)
    yield Decision("host memory of batches and saved state", "pinned" if backend.pins_memory else "pageable")


def _process_decisions(world: int, device: torch.device) -> Iterator[Decision]:
    backend = backend_of(device)
    library = "none: one process" if world == 1 or backend.collectives is None else backend.collectives.name
    yield Decision("process group", library)
    if world == 1:
        return
    order = "after joining the group" if backend.group_before_device else "before joining the group"
    yield Decision("device of a process", f"selected {order}")
    if backend.group_differs:
        yield Decision("groups", "tried at the start", "releases differ in what they can do")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
