"""Reports of a rehearsal: lines of text, and JSON values."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hlat.planner import format_number
from hlat.rehearsal.observers import CATEGORIES
from hlat.rehearsal.plan import FitVerdict
from hlat.rehearsal.rank import RankReport
from hlat.runtime.terminal import plural

# world.py imports this file.
if TYPE_CHECKING:
    from hlat.rehearsal.world import Rehearsal

_GIB = 1 << 30
_WIDE = 120
_DEGREES = ("pipeline", "data", "context", "tensor", "zero", "replicas")
_PART_TITLES = {
    "compute": "computing, recomputing",
    "tensor": "waiting: tensor axis",
    "context": "waiting: context axis",
    "pipeline": "waiting: other stages",
    "data": "waiting: data axis",
    "optimizer": "optimizer's update",
    "stragglers": "waiting: slowest device",
}


def report_lines(report: RankReport, width: int = _WIDE) -> Iterator[str]:
    """Lines of text about one rank, of at most ``width`` columns."""
    position = report.coordinates
    layers = ", ".join(f"{start} to {stop - 1}" for start, stop in report.layers)
    coordinates = f"pipeline {position.pp}, data {position.dp}, context {position.cp}, tensor {position.tp}"
    yield from _wrapped(f"rank {report.rank}: {coordinates}; layers {layers}", 2, width)
    yield f"  memory      {_gib(report.peak_bytes)} at the peak, in {report.peak_phase}:"
    for name, size in report.peak.items():
        if size >= report.peak_bytes / 1000:
            yield from _wrapped(f"    {name:14} {_gib(size):>12}   {CATEGORIES[name]}", 34, width)
    yield f"    between steps  {_gib(sum(report.between_steps.values())):>12}"
    yield "  messages per step, by axis:"
    totals = _totals(report)
    longest = max((len(axis) for axis, _ in totals), default=0)
    for (axis, kind), (count, size) in totals.items():
        yield f"    {axis:{max(14, longest)}} {kind:14} {count:8,} x, {_gib(size):>12} in total"
    if not report.messages:
        yield "    none"
    yield f"  compute     {report.flops:.4g} FLOPs per step"
    yield f"  checkpoint  {plural(report.checkpoint_blocks, 'block')}, {_gib(report.checkpoint_bytes)}"


def decision_lines(rehearsal: "Rehearsal", width: int = _WIDE) -> Iterator[str]:
    """Table of decisions of the simulated device; nothing for a CPU."""
    if rehearsal.device is None:
        return
    yield from _wrapped(
        f"simulated: {rehearsal.device}. Kernels do not run; tensors and collectives are fake", 2, width
    )
    names, choices = (
        max(len(getattr(decision, column)) for decision in rehearsal.decisions) for column in ("name", "choice")
    )
    for decision in rehearsal.decisions:
        line = f"  {decision.name:{names}}  {decision.choice:{choices}}  {decision.reason}".rstrip()
        yield from _wrapped(line, names + 4, width)


def verdict_lines(rehearsal: "Rehearsal", width: int = _WIDE) -> Iterator[str]:
    """Lines of text: if the fullest rank fits on the device, and what would help if it does not."""
    verdict = rehearsal.verdict
    if verdict is None:
        return
    yield from _wrapped(
        f"memory: {'fits' if verdict.fits else 'DOES NOT FIT'}. Rank {verdict.rank}, the fullest rehearsed, needs "
        f"{_gib(verdict.needed)}; {verdict.usable / verdict.memory:.0%} of the device's {_gib(verdict.memory)} are "
        f"{_gib(verdict.usable)}",
        2,
        width,
    )
    yield from _wrapped(
        f"  tensors {_gib(verdict.tensors)} (rehearsed), runtime of the device {_gib(verdict.runtime)}, allocator "
        f"{_gib(verdict.slack)} (as planned)",
        4,
        width,
    )
    if not verdict.fits:
        yield from _wrapped(_remedy_line(rehearsal, verdict), 2, width)
        for remedy in verdict.remedies:
            seconds = format_number(remedy.step_seconds)
            yield f"    {remedy.override:38} {_gib(remedy.needed):>12} {seconds:>9} s a step"


def _remedy_line(rehearsal: "Rehearsal", verdict: FitVerdict) -> str:
    if verdict.remedies and rehearsal.plan is not None:
        seconds = format_number(rehearsal.plan.prediction.step_seconds)
        return f"  any of these changes would help, by the plan (now {seconds} s a step):"
    return "  `hlat plan --model RECIPE --cluster INSTANCE:N` looks for a layout that fits, or says what else would"


def time_lines(rehearsal: "Rehearsal", width: int = _WIDE) -> Iterator[str]:
    """Time of a step: the plan's, and that of the operations of each rehearsed rank."""
    if rehearsal.not_planned:
        yield from _wrapped(f"time: not predicted, since {rehearsal.not_planned}", 2, width)
    if rehearsal.plan is None:
        return
    planned, timelines = rehearsal.plan, rehearsal.timelines
    yield from _wrapped(
        f"time of a step on {planned.request.cluster.name}, predicted: by the plan, and for the operations that were "
        "rehearsed; seconds",
        2,
        width,
    )
    low, high = planned.prediction.interval.of(planned.prediction.step_seconds)
    yield _row("", ["plan", *(f"rank {timeline.rank}" for timeline in timelines)])
    for part, title in _PART_TITLES.items():
        numbers = [planned.parts[part], *(timeline.parts[part] for timeline in timelines)]
        if any(numbers):
            yield _row(title, [format_number(number, 3) if number else "0" for number in numbers])
    steps = [planned.prediction.step_seconds, *(timeline.seconds for timeline in timelines)]
    yield _row("step", [format_number(seconds, 3) for seconds in steps])
    yield _row("relative to the plan", ["", *(f"{seconds / steps[0] - 1:+.1%}" for seconds in steps[1:])])
    yield f"  between {format_number(low, 3)} and {format_number(high, 3)} in 80 % of runs, by the plan"


def note_lines(rehearsal: "Rehearsal", asked_mode: str, width: int = _WIDE) -> Iterator[str]:
    """Lines about what was rehearsed instead of what the recipe says; ``asked_mode`` may be "auto"."""
    recipe = rehearsal.recipe
    if recipe.batch.ramp:
        yield f"batch.ramp: rehearsed with the final batch of {plural(recipe.batch.global_batch, 'sequence')}"
    if recipe.precision.mode != asked_mode:
        where = "devices with fast bf16" if rehearsal.device is None else str(rehearsal.device)
        yield from _wrapped(
            f"precision.mode=auto: rehearsed as {recipe.precision.mode}, its value on {where}", 2, width
        )


def _row(title: str, cells: Sequence[str]) -> str:
    return f"  {title:24}" + "".join(f" {cell:>10}" for cell in cells)


def _wrapped(line: str, indent: int, width: int) -> Iterator[str]:
    """Break a line at ``width`` columns; what follows begins below the column ``indent``."""
    yield from textwrap.wrap(line, max(width, indent + 20), subsequent_indent=" " * indent, break_long_words=False)


def rehearsal_json(rehearsal: "Rehearsal") -> dict[str, Any]:
    """All numbers as JSON values: layout, and every rank; bytes and FLOPs are integers."""
    layout = rehearsal.layout
    return {
        "world": layout.world,
        "layout": {name: getattr(layout, name) for name in _DEGREES},
        "precision": rehearsal.recipe.precision.mode,
        "micro_batches": rehearsal.recipe.micro_batches(layout.world),
        "tokens_per_step": rehearsal.recipe.tokens_per_step,
        "device": _device_json(rehearsal),
        "memory_verdict": _verdict_json(rehearsal.verdict),
        "time": _time_json(rehearsal),
        "time_not_predicted": rehearsal.not_planned or None,
        "ranks": [_rank_json(report) for report in rehearsal.ranks],
    }


def _device_json(rehearsal: "Rehearsal") -> dict[str, Any] | None:
    """Simulated device and its decisions; None for the CPU of this machine."""
    device = rehearsal.device
    if device is None:
        return None
    return {
        "type": device.device_type,
        "chip": device.chip.name,
        "memory_bytes": device.memory_bytes,
        "decisions": [asdict(decision) for decision in rehearsal.decisions],
    }


def _verdict_json(verdict: FitVerdict | None) -> dict[str, Any] | None:
    """Memory of the fullest rank on the device; None without a device."""
    if verdict is None:
        return None
    return {
        "fits": verdict.fits,
        "rank": verdict.rank,
        "needed_bytes": round(verdict.needed),
        "tensor_bytes": round(verdict.tensors),
        "runtime_bytes": round(verdict.runtime),
        "allocator_bytes": round(verdict.slack),
        "usable_bytes": round(verdict.usable),
        "memory_bytes": round(verdict.memory),
        "remedies": [
            {"override": each.override, "needed_bytes": round(each.needed), "step_seconds": each.step_seconds}
            for each in verdict.remedies
        ],
    }


def _time_json(rehearsal: "Rehearsal") -> dict[str, Any] | None:
    """Predicted time of a step; None without a plan."""
    if rehearsal.plan is None:
        return None
    return {
        "cluster": rehearsal.plan.request.cluster.name,
        "step_seconds": rehearsal.plan.prediction.step_seconds,
        "interval_seconds": list(rehearsal.plan.prediction.interval.of(rehearsal.plan.prediction.step_seconds)),
        "parts_seconds": rehearsal.plan.parts,
        "ranks": [
            {"rank": timeline.rank, "step_seconds": timeline.seconds, "parts_seconds": timeline.parts}
            for timeline in rehearsal.timelines
        ],
    }


def _rank_json(report: RankReport) -> dict[str, Any]:
    position = report.coordinates
    messages = sorted(report.messages.items())
    return {
        "rank": report.rank,
        "place": {"pipeline": position.pp, "data": position.dp, "context": position.cp, "tensor": position.tp},
        "layers": [list(stage) for stage in report.layers],
        "memory": {
            "peak_bytes": report.peak_bytes,
            "peak_phase": report.peak_phase,
            "at_peak": report.peak,
            "between_steps": report.between_steps,
        },
        "messages": [
            {"axis": message.axis, "kind": message.kind, "bytes": message.bytes, "count": count}
            for message, count in messages
        ],
        "flops": report.flops,
        "checkpoint": {"blocks": report.checkpoint_blocks, "bytes": report.checkpoint_bytes},
    }


def _totals(report: RankReport) -> dict[tuple[str, str], tuple[int, int]]:
    """Number of messages and bytes, by axis and kind."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for (axis, kind, size), count in sorted(report.messages.items()):
        number, sent = totals.get((axis, kind), (0, 0))
        totals[axis, kind] = number + count, sent + count * size
    return totals


def _gib(size: float) -> str:
    if size < 1 << 10:
        return f"{size:.0f} bytes"
    return f"{size / _GIB:,.3f} GiB" if size >= _GIB / 100 else f"{size / (1 << 20):,.3f} MiB"
