"""Devices of a plan: their figures, whether hlat runs on them, and the kernels that a run would get.

    Cluster -> DeviceSpec: figures per torch device; where none is published, that of the nearest chip
    chip, precision mode -> why_not_runnable -> reason, or nothing; comparison_note -> the sentence of a plan
    request, candidate -> the chip's backend (hlat.runtime.backend), asked as a run asks it -> PlannedExecution

hlat cannot run on chips without a backend, nor in number formats that a backend does not multiply in. A plan for them
is made for comparison, and says so in its table, its JSON and its recipe fragment.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from hlat.config import compile_obstacle
from hlat.hardware import Chip, Cluster
from hlat.model import attention_heads
from hlat.parallel import compile_refusal
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import CHIP_FAMILIES, DeviceSpec
from hlat.precision import MODES
from hlat.runtime.backend.base import AttentionHeads, AttentionKernel, Backend
from hlat.runtime.backend.table import backend_of

# Share of the peak that large matrix products reach, for chips of which it was never measured. NVIDIA: the nearest chip
# of the family. Others: nothing is published, and the constant `products` already contains the sustained share.
# Other families: that of the chips whose constants they take; AMD's, of an MI300X.
_REACHED = {
    # family -> in 16 bits, in 8 bits
    "ampere": (0.869, 0.869),
    "hopper": (0.803, 0.709),
    "blackwell": (0.776, 0.763),
    "trainium": (0.9, 0.9),
    "tpu": (0.9, 0.9),
    "measured": (1.0, 1.0),
    "cdna": (0.511, 0.487),  # 8 bits: 1,273 of 2,615 TFLOP/s, AMD's own measurement of an MI300X
    # In 16 bits 2,487 TFLOP/s of 12 x 416 in an Aurora node, all dies busy (one alone: 256): Argonne's user guide,
    # table of GEMM; in 8 bits as ampere, whose constants it takes.
    # https://docs.alcf.anl.gov/aurora/node-performance-overview/node-performance-overview/
    "xe": (0.498, 0.869),
}


def request_device(request: PlanRequest) -> DeviceSpec:
    """One torch device of the request's cluster, adjusted for its precision mode."""
    device = cluster_device(request.cluster)
    # The formulas count bytes in 16 bits, as every mode but fp32 computes. In fp32 every size doubles; the rates are
    # halved instead.
    if MODES[request.mode].compute.itemsize == 2:
        return device
    peak = request.cluster.chip.flops("float32") or device.peak / 4
    halved = {name: getattr(device, name) / 2 for name in ("memory_rate", "link_rate", "network_rate")}
    return replace(device, peak=peak, **halved)


def cluster_device(cluster: Cluster) -> DeviceSpec:
    """One torch device of a cluster. Its fast-link domain may be larger than the cluster."""
    chip, instance = cluster.chip, cluster.instance
    family = chip.family if chip.family in CHIP_FAMILIES else "measured"
    nearest = CHIP_FAMILIES[family].like or family
    measured, steps = chip.reached, instance.collectives
    usual, eight_bit = _REACHED.get(family, _REACHED[nearest])
    reached = (measured and measured.bfloat16) or usual
    return DeviceSpec(
        family=family,
        peak=chip.flops(chip.sixteen_bit or "") or 0.0,
        peak_eight_bit=chip.flops("float8") or 0.0,
        reached=reached,
        reached_eight_bit=(measured and measured.float8) or eight_bit,
        memory_bytes=cluster.memory_bytes,
        memory_rate=cluster.memory_rate,
        link_rate=cluster.link_rate,
        domain=instance.domain * chip.devices,
        network_rate=cluster.network_rate,
        per_instance=cluster.devices_per_instance,
        per_chip=chip.devices,
        # Attention runs on the matrix engines too: a relative's share of the peak shrinks with what products reach.
        attention_rate=1.0 if nearest == family else reached / _REACHED[nearest][0],
        hop=1e-6 * steps.hop_us if steps else 0.0,
        network_hop=1e-6 * steps.network_hop_us if steps else 0.0,
        direct_bytes=1e6 * steps.direct_mb if steps else 0.0,
        doubling_bytes=1e6 * steps.doubling_mb if steps else 0.0,
    )


_ELSEWHERE = torch.device("meta")  # backends answer for the chip, not for a device that is here


def chip_backend(chip: Chip) -> Backend | None:
    """None if hlat has no backend for the chip."""
    return None if chip.device is None else _chip_backend(chip.device, chip.vendor, chip.capability)


@cache  # a search asks for each of thousands of layouts
def _chip_backend(device_type: str, vendor: str, capability: tuple[int, int] | None) -> Backend:
    return backend_of(device_type).of_chip(vendor, capability)


def why_not_runnable(chip: Chip, mode: str) -> str:
    """Return the reason why hlat cannot train on a chip in a precision mode, without a full stop; empty if it can."""
    backend = chip_backend(chip)
    if backend is None:
        # Written by `hlat hardware measure`, so hlat has run there.
        measured = chip.family == "measured"
        return "" if measured else f"hlat has no backend for {chip.name}"
    if mode == "fp8" and (refusal := backend.fp8_refusal(_ELSEWHERE)):
        return f"hlat does not run fp8 on {chip.name}: {refusal}"
    if MODES[mode].compute == torch.bfloat16 and chip.sixteen_bit != "bfloat16":
        return f"{chip.name} multiplies in fp16, not in bf16, which precision {mode} needs and torch emulates slowly"
    return ""


def comparison_note(request: PlanRequest) -> str:
    """Return the sentence that marks a plan which hlat cannot run; empty for one that it can."""
    reason = why_not_runnable(request.cluster.chip, request.mode)
    return f"for comparison only: {reason}" if reason else ""


@dataclass(frozen=True)
class PlannedExecution:
    """Decisions that a run makes on its device."""

    attention: AttentionKernel | None  # None on chips or in number formats that hlat does not run
    deterministic: bool  # run.deterministic, resolved
    compiled: bool  # blocks are compiled


def planned_attention(request: PlanRequest, tensor: int, context: int) -> tuple[AttentionKernel | None, bool]:
    """Choose the kernel of attention, and ``run.deterministic``, as a run with these degrees does."""
    recipe, chip = request.recipe, request.cluster.chip
    isolate = recipe is not None and recipe.data.isolate
    backend = chip_backend(chip)
    if backend is None or why_not_runnable(chip, request.mode):
        return None, request.deterministic is not False
    model, sequence = request.model, request.sequence
    heads = attention_heads(model, request.mode, sequence, isolate=isolate, tensor=tensor, context=context)
    return _attention_kernel(backend, heads, request.deterministic)


def planned_execution(request: PlanRequest, candidate: Candidate) -> PlannedExecution:
    """Decide as a run of this request in this layout does."""
    chip, recipe = request.cluster.chip, request.recipe
    asked = "auto" if recipe is None else recipe.run.compile
    layout, backend = candidate.parallel, chip_backend(chip)
    if backend is None:
        refusal = compile_obstacle(layout.pipeline, layout.schedule)
    else:
        refusal = compile_refusal(layout, MODES[request.mode].compute, 0.0, candidate.world, backend, _ELSEWHERE)
    compiled = asked == "blocks" or (asked == "auto" and not refusal)
    return PlannedExecution(*planned_attention(request, candidate.tensor, candidate.context), compiled)


@lru_cache  # a search asks for thousands of layouts, with few kinds of heads
def _attention_kernel(
    backend: Backend, heads: AttentionHeads, deterministic: bool | None
) -> tuple[AttentionKernel, bool]:
    if deterministic is None:
        deterministic = backend.deterministic_by_default(heads, _ELSEWHERE)
    return backend.attention_kernel(heads, deterministic, _ELSEWHERE), deterministic
