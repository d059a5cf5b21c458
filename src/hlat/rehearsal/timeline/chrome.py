"""Timelines of ranks in the trace event format, for chrome://tracing and Perfetto.

RankTimeline -> a process per rank: tracks of passes, computation, and the messages of each group of ranks
"""

from collections.abc import Iterator
from typing import Any

from hlat.rehearsal.rank import RankReport
from hlat.rehearsal.timeline.replay import COMPUTE, RankTimeline
from hlat.rehearsal.trace import described

_PASSES = "passes"
_MICROSECONDS = 1e6


def timeline_events(report: RankReport, timeline: RankTimeline) -> Iterator[dict[str, Any]]:
    """Yield the metadata of a rank and its tracks, and complete events in microseconds.

    Args:
        report: the rank.
        timeline: its step in time.
    """
    layers = ", ".join(f"{start} to {stop - 1}" for start, stop in report.layers)
    yield _metadata(timeline.rank, 0, "process_name", f"rank {timeline.rank}, layers {layers}")
    yield {**_metadata(timeline.rank, 0, "process_sort_index", ""), "args": {"sort_index": timeline.rank}}
    messages = sorted({placed.stream for placed in timeline.events} - {COMPUTE})
    tracks = {name: number for number, name in enumerate((_PASSES, COMPUTE, *messages))}
    for name, number in tracks.items():
        shown = name if name in (_PASSES, COMPUTE) else f"messages: {name}"
        yield _metadata(timeline.rank, number, "thread_name", shown)
        yield {**_metadata(timeline.rank, number, "thread_sort_index", ""), "args": {"sort_index": number}}
    for of_pass, start, stop in timeline.passes:
        arguments = {"stage": of_pass.stage, "micro-batch": of_pass.micro_batch}
        name = f"{of_pass.kind} {of_pass.micro_batch}"
        yield {
            **_complete(timeline.rank, tracks[_PASSES], start, stop),
            "name": name,
            "cat": of_pass.kind,
            "args": arguments,
        }
    for placed in timeline.events:
        yield {
            **_complete(timeline.rank, tracks[placed.stream], placed.start, placed.stop),
            **described(placed.event),
        }


def _metadata(rank: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": kind, "args": {"name": name}}


def _complete(rank: int, track: int, start: float, stop: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": start * _MICROSECONDS,
        "dur": (stop - start) * _MICROSECONDS,
    }
