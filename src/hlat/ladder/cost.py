"""Cost of a run of a ladder: seconds, from steps of some sizes measured on this machine.

    sizes --probe: some steps by hlat train--> Speed each --Speeds.seconds--> seconds of a PlannedRun

The planner's model of a step is made for large models on accelerators. Steps of small ones wait for memory, launches
and Python, which only the machine itself knows. So a few steps of real runs are measured: of the sizes of the cheapest
design, and then of the largest that the budget seems to pay for, until that one has been measured.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from shutil import rmtree

from hlat.ladder.planned_runs import PlannedRun, Target, places
from hlat.reporting import active_seconds, read_run
from hlat.runtime.errors import LaunchError
from hlat.sweep import run_hlat
from hlat.tracking import read_metrics

_STEPS, _WARM = 16, 6  # of a probe; the first ones are slower
_STEP_FLOPS = 1e12  # of a probe's step, at most about: the batch is smaller for large models
_SEQUENCES = 64  # that a probe evaluates, at most
_APART = 1.3  # FLOPs per token, divided by the nearest measured ones, up to which a size counts as measured


@dataclass(frozen=True)
class Speed:
    """Seconds of a size's parts of a run."""

    flops: float  # per token
    start: float  # from the record's begin to its end, without steps and validations: compilation, checkpoints
    token: float  # of training
    validation_token: float
    outside: float = 0.0  # before and after that: Python, imports, text, the model


@dataclass(frozen=True)
class Speeds:
    """Measured sizes, the smallest first, and what stands between them."""

    measured: tuple[Speed, ...]

    def seconds(self, run: PlannedRun) -> float:
        """Predict the seconds of what a run does itself."""
        speed = self.at(run.flops)
        steps = run.own_tokens * speed.token + run.validated_tokens * speed.validation_token
        return speed.outside + speed.start + steps

    def covers(self, flops: float) -> bool:
        return any(1 / _APART <= flops / one.flops <= _APART for one in self.measured)

    def at(self, flops: float) -> Speed:
        """Interpolate; beyond the largest size time grows as FLOPs, and below the smallest it stays."""
        place = bisect_left([one.flops for one in self.measured], flops)
        if place in (0, len(self.measured)):
            one = self.measured[max(0, place - 1)]
            more = max(1.0, flops / one.flops)
            return Speed(flops, one.start, one.token * more, one.validation_token * more, one.outside)
        low, high = self.measured[place - 1 : place + 1]
        share = (flops - low.flops) / (high.flops - low.flops)
        return Speed(*(a + share * (b - a) for a, b in zip(astuple(low), astuple(high), strict=True)))


def measure(
    choose: Callable[[Callable[[PlannedRun], float]], Sequence[PlannedRun]],
    probe: Callable[[PlannedRun], Speed],
    first: Sequence[PlannedRun],
) -> Speeds:
    """Measure two sizes, then on until the largest one that ``choose`` takes, given the seconds of a run, is measured.

    The first two are the ends of ``first``, the cheapest design: whether the budget pays for it must not be a guess.
    """
    ends = (min(first, key=lambda run: run.flops), max(first, key=lambda run: run.flops))
    speeds = Speeds(tuple(probe(run) for run in ends))
    while not speeds.covers((largest := max(choose(speeds.seconds), key=lambda run: run.flops)).flops):
        speeds = Speeds(tuple(sorted((*speeds.measured, probe(largest)), key=lambda one: one.flops)))
    return speeds


def probe_run(target: Target, run: PlannedRun, folder: Path, options: Sequence[str]) -> Speed:
    """Train some steps of a run of the ladder in a folder of its own, which is removed; LaunchError if that fails."""
    recipe = target.recipe
    batch, length = recipe.batch.global_batch, recipe.data.sequence_length
    least = recipe.batch.micro_batch if recipe.gives("batch.micro_batch") else 1
    # Halved only: the number of processes divides it still, unless it is too small for them.
    while batch % (2 * least) == 0 and batch * length * run.flops > _STEP_FLOPS:
        batch //= 2
    place = folder / "probe"
    sequences = min(_SEQUENCES, recipe.evaluation.sequences or _SEQUENCES)
    words = [
        f"training.steps={_STEPS}",
        "training.log_every=1",
        "schedule.warmup_steps=0",
        "schedule.horizon_steps=null",
        f"batch.global_batch={batch}",
        f"evaluation={{every_steps: null, sequences: {sequences}}}",
        "checkpoint={every_steps: null, background: false}",
        *places(target, folder, "probe"),
    ]
    rmtree(place, ignore_errors=True)
    began = time.monotonic()
    code, interrupted = run_hlat(
        ["train", "--quiet", *options, target.source, *target.words, *run.overrides, *words], silent=True
    )
    wall = time.monotonic() - began
    if interrupted:
        raise KeyboardInterrupt
    if code:
        raise LaunchError(f"{place}: a run of {run.name} failed with exit code {code}; its messages are above.")
    lines = [line["seconds"] for line in read_metrics(place / "metrics.jsonl")]
    inside = active_seconds(read_run(place))
    rmtree(place, ignore_errors=True)
    validation = sum(line.get("evaluation", 0.0) for line in lines)
    step = statistics.median(
        sum(seconds for phase, seconds in line.items() if phase != "evaluation") for line in lines[_WARM:]
    )
    validated = min(sequences * length, target.validation_tokens or sequences * length)
    start = max(0.0, inside - _STEPS * step - validation)
    return Speed(run.flops, start, step / (batch * length), validation / validated, max(0.0, wall - inside))
