"""Reports of a rehearsal: lines of text, and JSON values."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hlat.rehearsal.memory import CATEGORIES
from hlat.rehearsal.rank import RankReport

if TYPE_CHECKING:
    from hlat.rehearsal.world import Rehearsal

_GIB = 1 << 30


def report_lines(report: RankReport) -> Iterator[str]:
    """Lines of text about one rank."""
    position = report.coordinates
    layers = ", ".join(f"{start} to {stop - 1}" for start, stop in report.layers)
    coordinates = f"pipeline {position.pp}, data {position.dp}, context {position.cp}, tensor {position.tp}"
    yield f"rank {report.rank}: {coordinates}; layers {layers}"
    yield f"  memory      {_gib(report.peak_bytes)} at the peak, in {report.peak_phase}:"
    for name, size in report.peak.items():
        if size >= report.peak_bytes / 1000:
            yield f"    {name:14} {_gib(size):>12}   {CATEGORIES[name]}"
    yield f"    between steps  {_gib(sum(report.between_steps.values())):>12}"
    yield "  messages per step, by axis:"
    for (axis, kind), (count, size) in _totals(report).items():
        yield f"    {axis:14} {kind:14} {count:8,} x, {_gib(size):>12} in total"
    if not report.messages:
        yield "    none"
    yield f"  compute     {report.flops:.4g} FLOPs per step"
    yield f"  checkpoint  {report.checkpoint_blocks:,} blocks, {_gib(report.checkpoint_bytes)}"


def rehearsal_json(rehearsal: "Rehearsal") -> dict[str, Any]:
    """The rehearsal as JSON values: layout, and all numbers of every rank; bytes and FLOPs are integers."""
    layout = rehearsal.layout
    return {
        "world": layout.world,
        "layout": {
            "pipeline": layout.pipeline,
            "data": layout.data,
            "context": layout.context,
            "tensor": layout.tensor,
            "zero": layout.zero,
            "replicas": layout.replicas,
        },
        "precision": rehearsal.recipe.precision.mode,
        "micro_batches": rehearsal.recipe.micro_batches(layout.world),
        "tokens_per_step": rehearsal.recipe.tokens_per_step,
        "ranks": [_rank_json(report) for report in rehearsal.ranks],
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
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for (axis, kind, size), count in sorted(report.messages.items()):
        counts[axis, kind] += count
        sizes[axis, kind] += count * size
    return {key: (counts[key], sizes[key]) for key in counts}


def _gib(size: int) -> str:
    return f"{size / _GIB:,.3f} GiB" if size >= _GIB / 100 else f"{size / (1 << 20):,.3f} MiB"
