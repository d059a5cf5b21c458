"""``hlat train --profile``: a trace of some steps of every rank, and a table of where their time went.

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

_SKIPPED, _STEPS = 3, 3  # the first steps allocate and compile
_LISTED = 12

_KINDS = (  # the first whose words are in the name of an operator
    ("communication", ("c10d", "nccl", "gloo", "record_param_comms", "all_reduce", "allreduce", "reduce_scatter")),
    ("attention", ("scaled_dot_product", "flash", "attention", "sdpa")),
    ("optimizer", ("adamw", "Optimizer", "lerp", "addcdiv", "foreach_norm")),
    ("matrix products", ("::mm", "addmm", "bmm", "matmul", "linear", "gemm", "cutlass", "nvjet", "cublas")),
    ("copies and casts", ("copy_", "Memcpy", "Memset", "_to_copy", "contiguous", "clone", "fill_", "zero_", "cat")),
    ("compiled", ("triton", "inductor", "CompiledFunction", "graph_")),
)
_OTHER = "pointwise and the rest"


@dataclass(frozen=True)
class Cost:
    """Time of one operator itself, without those it calls, in microseconds, over the profiled steps."""

    name: str
    microseconds: float


def kind_of(name: str) -> str:
    """What kind of work an operator or kernel does."""
    return next((kind for kind, words in _KINDS if any(word in name for word in words)), _OTHER)


def table(costs: Iterable[Cost], steps: int) -> str:
    """Seconds per step and share, by kind, and the dearest operators."""
    listed = sorted(costs, key=lambda cost: -cost.microseconds)
    total = sum(cost.microseconds for cost in listed) or 1.0
    kinds: defaultdict[str, float] = defaultdict(float)
    for cost in listed:
        kinds[kind_of(cost.name)] += cost.microseconds
    rows = sorted(kinds.items(), key=lambda row: -row[1])
    lines = [f"{'kind':44s} {'s per step':>10s} {'share':>7s}"]
    lines += [f"{name:44s} {us / steps / 1e6:10.4f} {us / total:7.1%}" for name, us in rows]
    lines += ["", f"{'operator':44s} {'s per step':>10s} {'share':>7s}"]
    lines += [
        f"{cost.name[:44]:44s} {cost.microseconds / steps / 1e6:10.4f} {cost.microseconds / total:7.1%}"
        for cost in listed[:_LISTED]
    ]
    return "\n".join(lines) + "\n"


@contextmanager
def profiled(wanted: bool, folder: Path, rank: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Yields what has to be called after each step.

    Args:
        wanted: whether to profile at all.
        folder: where trace and table go.
        rank: of this process.
        say: told the table, once it is there.
    """
    if not wanted:
        yield lambda: None
        return

    def write(finished: profile) -> None:
        folder.mkdir(exist_ok=True)
        finished.export_chrome_trace(str(folder / f"rank-{rank}.json"))
        text = table(_costs(finished), _STEPS)
        (folder / f"rank-{rank}.txt").write_text(text, encoding="utf-8")
        say(f"profile of {_STEPS} steps, in {folder}:\n{text}")

    activities = [ProfilerActivity.CPU]
    if torch.accelerator.is_available():
        activities += [each for each in torch.profiler.supported_activities() if each != ProfilerActivity.CPU]
    plan = schedule(wait=_SKIPPED - 1, warmup=1, active=_STEPS, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as running:
        yield running.step


def _costs(finished: profile) -> list[Cost]:
    """Of the kernels where a device reports them, else of the operators on the CPU."""
    events = finished.key_averages()
    on_device = [Cost(event.key, event.self_device_time_total) for event in events]
    if sum(cost.microseconds for cost in on_device) > 0:
        return [cost for cost in on_device if cost.microseconds > 0]
    return [Cost(event.key, event.self_cpu_time_total) for event in events if not event.key.startswith("ProfilerStep")]
