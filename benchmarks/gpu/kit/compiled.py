"""Compiled blocks beside float64: documents, windows, recomputation; and what the profiler of the GPU says of the loss.

CPU in float64 --gradients of a step--> compiled on the device, for each policy: as near as the eager CPU's
"""

import shutil
import subprocess
import sys
from typing import Any

import torch

from kit.child import Context
from kit.parity import gradient_errors, overrides, trace
from kit.shapes import recipe
from kit.training import device_of, quick_compiler

_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"data.isolate": True},
    "documents, window": {"data.isolate": True, "model.architecture": "mistral", "model.sliding_window": 24},
    "documents, selective": {"data.isolate": True, "memory.activation_checkpointing": "selective"},
    "documents, full": {"data.isolate": True, "memory.activation_checkpointing": "full"},
}
_NCU_LIMIT = 25.0
_METRICS = "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum"


def run(context: Context) -> None:
    """Check gradients, then ask for the counters."""
    with quick_compiler(context.device):
        for name, changes in _CASES.items():
            with context.part(name):
                gradients(context, name, changes)
                torch.compiler.reset()
    with context.part("counters"):
        counters(context)


def gradients(context: Context, name: str, changes: dict[str, Any]) -> None:
    """Compare the gradients of compiled blocks with those of an uncompiled CPU, by their distance from float64."""
    asked = recipe("parity", context.tiny, context.device, context.work, {"precision.mode": "mixed", **changes})
    host = recipe("parity", context.tiny, "cpu", context.work, {**overrides("mixed"), **changes})
    exact, reference = trace(host.in_mode("fp32"), torch.float64), trace(host)
    found = trace(asked, device=device_of(context.device))
    ours, theirs = gradient_errors(found, exact), gradient_errors(reference, exact)
    # Compiled code rounds at fewer places than the CPU; only the order of sums adds (kit/parity.py).
    wrong = {key: (ours[key], theirs[key]) for key in ours if ours[key] > 2 * theirs[key] + 1e-4}
    context.found({f"{name}: worst gradient": max(ours.values()), f"{name}: of a CPU": max(theirs.values())})
    context.check(
        f"{name}: compiled gradients are as near to float64 as a CPU's", not wrong, dict(list(wrong.items())[:5])
    )


def counters(context: Context) -> None:
    """Let ncu count the bytes of each kernel of one chunk of the loss; clocks stay as they are."""
    ncu = shutil.which("ncu")
    if ncu is None:
        context.skip("counters", "ncu is not installed")
        return
    child = [sys.executable, "-c", "from kit.compiled import chunk_of_loss; chunk_of_loss()"]
    options = ["--clock-control", "none", "--metrics", _METRICS, "--csv", "--launch-count", "40"]
    try:
        done = subprocess.run(
            [ncu, *options, *child], capture_output=True, text=True, errors="replace", timeout=_NCU_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        context.skip("counters", f"ncu has not ended within {_NCU_LIMIT:.0f} s")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        context.skip("counters", f"ncu counts nothing here: {(done.stdout + done.stderr)[-500:]}")
        return
    context.found({"ncu of a chunk of the loss": lines[:130]})


def chunk_of_loss(device: str = "cuda") -> None:
    """Compute one chunk of head and loss of an 8B model, forward and backward."""
    from hlat.model import CrossEntropy, head_loss

    hidden = torch.randn(2048, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 128256, (2048,), device=device)
    head_loss(hidden, weight, labels, CrossEntropy()).backward()
