"""Plans that hlat cannot run: chips without a backend, and number formats that a backend does not multiply in.

    chip, precision mode -> why_not_runnable -> reason, or nothing; comparison_note -> the sentence of a plan

Such a plan is made for comparison, and says so in its table, its JSON and its recipe fragment.
"""

from functools import cache

import torch

from hlat.hardware import Chip
from hlat.planner.problem.request import PlanRequest
from hlat.precision import MODES
from hlat.runtime.backend.base import Backend
from hlat.runtime.backend.table import backend_of


def chip_backend(chip: Chip) -> Backend | None:
    """Return the backend that answers for a chip; None if hlat has none."""
    return None if chip.device is None else _chip_backend(chip.device, chip.vendor, chip.capability)


@cache  # a search asks for each of thousands of layouts
def _chip_backend(device_type: str, vendor: str, capability: tuple[int, int] | None) -> Backend:
    return backend_of(device_type).of_chip(vendor, capability)


def why_not_runnable(chip: Chip, mode: str) -> str:
    """Return the reason why hlat cannot train on a chip in a precision mode, without a full stop; empty if it can.

    Args:
        chip: a chip of the catalog. One that ``hlat hardware measure`` wrote is a device that hlat runs on.
        mode: precision mode, one of ``MODES``.
    """
    backend = chip_backend(chip)
    if backend is None:
        measured = chip.family == "measured"
        return "" if measured else f"hlat has no backend for {chip.name}"
    device = torch.device("meta")  # the backend answers for the chip, not for a device that is here
    if mode == "fp8" and (refusal := backend.fp8_refusal(device)):
        return f"hlat does not run fp8 on {chip.name}: {refusal}"
    if MODES[mode].compute == torch.bfloat16 and chip.sixteen_bit != "bfloat16":
        return f"{chip.name} multiplies in fp16, not in bf16, which precision {mode} needs and torch emulates slowly"
    return ""


def comparison_note(request: PlanRequest) -> str:
    """Return the sentence that marks a plan which hlat cannot run; empty for one that it can."""
    reason = why_not_runnable(request.cluster.chip, request.mode)
    return f"for comparison only: {reason}" if reason else ""
