"""Components that act on the process, not on the model: the profiler, the garbage collector, injected faults.

    Profiler           ``hlat train --profile``: steps 4 to 6 -> torch.profiler
                           -> <run.dir>/profile/rank-0.json   for chrome://tracing or ui.perfetto.dev
                           -> <run.dir>/profile/rank-0.txt    seconds per step by kind of work
    GarbageCollector   Python's garbage collector, run after the same steps on every rank
    FaultInjection     faults of the recipe -> this rank's, at changes of phase

By default each rank collects in a different step, for tens of milliseconds with the many objects that torch keeps, and
all other ranks wait for it. No step creates reference cycles that hold tensors, so collecting rarely is enough.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from hlat.parallel import parse_pass_label
from hlat.resilience import FaultInjector
from hlat.runtime.progress import observe_phases
from hlat.training.components import LoopStart, StepEnd, TrainingComponent
from hlat.training.faulty_disk import fault_folder
from hlat.training.run_state import RunState

_SKIPPED_STEPS, _PROFILED_STEPS = 3, 3  # the first steps allocate and compile
_LISTED_OPERATORS = 12  # operators in the table

_KINDS_OF_WORK = (  # kind of work, and substrings of operator names; the first match counts
    ("communication", ("c10d", "nccl", "gloo", "record_param_comms", "all_reduce", "allreduce", "reduce_scatter")),
    ("attention", ("scaled_dot_product", "flash", "attention", "sdpa", "attend")),
    ("optimizer", ("adamw", "Optimizer", "lerp", "addcdiv", "foreach_norm")),
    ("matrix products", ("::mm", "addmm", "bmm", "matmul", "linear", "gemm", "cutlass", "nvjet", "cublas")),
    ("copies and casts", ("copy_", "Memcpy", "Memset", "_to_copy", "contiguous", "clone", "fill_", "zero_", "cat")),
    ("compiled", ("triton", "inductor", "CompiledFunction", "graph_")),
)
_OTHER_WORK = "pointwise and the rest"


@dataclass(frozen=True)
class OperatorTime:
    """Self time of one operator, without the operators it calls, in microseconds over all profiled steps."""

    name: str
    microseconds: float


def kind_of(name: str) -> str:
    """Return the kind of work of an operator or kernel: the first whose words its name contains."""
    return next((kind for kind, words in _KINDS_OF_WORK if any(word in name for word in words)), _OTHER_WORK)


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
        for each in operators[:_LISTED_OPERATORS]
    ]
    return "\n".join(lines) + "\n"


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


_COLLECT_EVERY = 100  # steps


def collect_garbage(step: int) -> None:
    """Run the collector after every 100th step."""
    if step % _COLLECT_EVERY == 0:
        # The two younger generations are enough: no step creates reference cycles that hold tensors.
        gc.collect(1)


@contextmanager
def scheduled_gc() -> Iterator[None]:
    """Disable automatic collection inside the block, and freeze the objects that exist at its start."""
    was_enabled = gc.isenabled()
    gc.collect()
    # What exists now stays for the whole run: later collections need not look at it.
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class GarbageCollector(TrainingComponent):
    """Runs Python's garbage collector after the same steps on every rank."""

    def begin(self, start: LoopStart) -> None:
        start.stack.enter_context(scheduled_gc())

    def after_step(self, end: StepEnd) -> None:
        collect_garbage(end.step)


class Profiler(TrainingComponent):
    """Profiles steps 4 to 6 of this process (``hlat train --profile``)."""

    def begin(self, start: LoopStart) -> None:
        self._folder, self._rank, self._say = (
            start.recipe.run_dir / "profile",
            start.runtime.rank,
            start.tracker.message,
        )
        activities = [ProfilerActivity.CPU]
        if torch.accelerator.is_available():
            activities += [each for each in torch.profiler.supported_activities() if each != ProfilerActivity.CPU]
        # One step of warm-up: starting to trace takes time that is not the step's.
        plan = schedule(wait=_SKIPPED_STEPS - 1, warmup=1, active=_PROFILED_STEPS, repeat=1)
        self._running = start.stack.enter_context(
            profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        )

    def after_step(self, end: StepEnd) -> None:
        self._running.step()

    def _write(self, finished: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json"))
        text = table(_operator_times(finished), _PROFILED_STEPS)
        (self._folder / f"rank-{self._rank}.txt").write_text(text, encoding="utf-8")
        self._say(f"profile of {_PROFILED_STEPS} steps, in {self._folder}:\n{text}")


class FaultInjection(TrainingComponent):
    """Injects this rank's faults at changes of phase."""

    def __init__(self, state: RunState) -> None:
        recipe = state.recipe
        self._state = state
        self._faults = FaultInjector(recipe.faults, state.runtime.ranks, fault_folder(recipe), recipe.batches)

    def begin(self, start: LoopStart) -> None:
        self._faults.set_parameters(self._state.model.local_parameters)
        start.stack.enter_context(observe_phases(self._faults))

    def before_step(self) -> None:
        step = self._state.step
        self._faults.begin_step(step + 1, self._state.anomalies.skipped.next_step_start(step))
