"""``hlat train --profile``: a trace of some steps of every rank, and a table of their time by kind of work.

steps 4 to 6 -> torch.profiler -> <run.dir>/profile/rank-0.json   for chrome://tracing or ui.perfetto.dev
                                  <run.dir>/profile/rank-0.txt    seconds per step by kind of work
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from hlat.parallel import parse_pass_label

_SKIPPED, _STEPS = 3, 3  # the first steps allocate and compile
_LISTED = 12  # operators in the table

_KINDS = (  # kind of work, and substrings of operator names; the first match counts
    ("communication", ("c10d", "nccl", "gloo", "record_param_comms", "all_reduce", "allreduce", "reduce_scatter")),
    ("attention", ("scaled_dot_product", "flash", "attention", "sdpa", "attend")),
    ("optimizer", ("adamw", "Optimizer", "lerp", "addcdiv", "foreach_norm")),
    ("matrix products", ("::mm", "addmm", "bmm", "matmul", "linear", "gemm", "cutlass", "nvjet", "cublas")),
    ("copies and casts", ("copy_", "Memcpy", "Memset", "_to_copy", "contiguous", "clone", "fill_", "zero_", "cat")),
    ("compiled", ("triton", "inductor", "CompiledFunction", "graph_")),
)
_OTHER = "pointwise and the rest"


@dataclass(frozen=True)
class OperatorTime:
    """Self time of one operator, without the operators it calls, in microseconds over all profiled steps."""

    name: str
    microseconds: float


def kind_of(name: str) -> str:
    """Return the kind of work of an operator or kernel, by its name."""
    return next((kind for kind, words in _KINDS if any(word in name for word in words)), _OTHER)


def table(times: Iterable[OperatorTime], steps: int) -> str:
    """Format seconds per step and share of time, by kind of work and for the slowest operators."""
    operators = sorted(times, key=lambda operator: -operator.microseconds)
    total = sum(operator.microseconds for operator in operators) or 1.0
    kinds: defaultdict[str, float] = defaultdict(float)
    for operator in operators:
        kinds[kind_of(operator.name)] += operator.microseconds
    rows = sorted(kinds.items(), key=lambda row: -row[1])
    lines = [f"{'kind':44s} {'s per step':>10s} {'share':>7s}"]
    lines += [f"{name:44s} {us / steps / 1e6:10.4f} {us / total:7.1%}" for name, us in rows]
    lines += ["", f"{'operator':44s} {'s per step':>10s} {'share':>7s}"]
    lines += [
        f"{each.name[:44]:44s} {each.microseconds / steps / 1e6:10.4f} {each.microseconds / total:7.1%}"
        for each in operators[:_LISTED]
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def profile_steps(wanted: bool, folder: Path, rank: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Profile steps 4 to 6, and yield the function to call after each step.

    Args:
        wanted: False yields a function that does nothing.
        folder: receives trace and table.
        rank: rank of this process, for the file names.
        say: shows the table to the user.
    """
    if not wanted:
        yield lambda: None
        return

    def write(finished: profile) -> None:
        folder.mkdir(exist_ok=True)
        finished.export_chrome_trace(str(folder / f"rank-{rank}.json"))
        text = table(_operator_times(finished), _STEPS)
        (folder / f"rank-{rank}.txt").write_text(text, encoding="utf-8")
        say(f"profile of {_STEPS} steps, in {folder}:\n{text}")

    activities = [ProfilerActivity.CPU]
    if torch.accelerator.is_available():
        activities += [each for each in torch.profiler.supported_activities() if each != ProfilerActivity.CPU]
    plan = schedule(wait=_SKIPPED - 1, warmup=1, active=_STEPS, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as running:
        yield running.step


def _operator_times(finished: profile) -> list[OperatorTime]:
    """Return the times of the device's kernels if it reports them, else of the operators on the CPU."""
    # A label of a pass is no operator: its own time is that of the host between operators.
    events = [event for event in finished.key_averages() if parse_pass_label(event.key) is None]
    on_device = [OperatorTime(event.key, event.self_device_time_total) for event in events]
    if sum(kernel.microseconds for kernel in on_device) > 0:
        return [kernel for kernel in on_device if kernel.microseconds > 0]
    return [
        OperatorTime(event.key, event.self_cpu_time_total)
        for event in events
        if not event.key.startswith("ProfilerStep")
    ]
