"""Wall time of every logged step, and the time that a run has been running.

    start, resume and rollback events: (step, time)  +  seconds of the phases of each line -> seconds since the start

Lines have durations and no times, so that equal runs have equal files. A line belongs to the last event that began at
an earlier step: lines of later steps were dropped when the run went back.
"""

from itertools import pairwise

import numpy as np

from hlat.reporting.run_record import Column, Floats, RunRecord

_ANCHORS = ("start", "resume", "rollback")


def step_seconds(run: RunRecord) -> dict[str, Column]:
    """Return the seconds by phase, as they were logged."""
    prefix = "seconds."
    return {name.removeprefix(prefix): column for name, column in run.metrics.items() if name.startswith(prefix)}


def wall_seconds(run: RunRecord) -> Floats:
    """Return the seconds from the run's first start to each logged step; times at which nothing ran count too."""
    if "step" not in run.metrics:
        return np.empty(0)
    steps = run.metrics["step"][0]
    durations = np.zeros(len(steps))
    for logged, values in step_seconds(run).values():
        durations[np.searchsorted(steps, logged)] += np.nan_to_num(values)
    passed = np.cumsum(durations)
    anchors = [(event.step or 0, event.time) for event in run.events if event.kind in _ANCHORS] or [(0, 0.0)]
    begin, wall = anchors[0][1], passed.copy()
    for step, time in anchors:
        first = int(np.searchsorted(steps, step, side="right"))
        before = passed[first - 1] if first else 0.0
        wall[first:] = time - begin + passed[first:] - before
    return np.maximum.accumulate(wall)


def active_seconds(run: RunRecord) -> float:
    """Return the time that processes of the run were running: from each start to its last event or logged step."""
    starts = [index for index, event in enumerate(run.events) if event.begins]
    if not starts:
        return float(sum(np.nansum(values) for _, values in step_seconds(run).values()))
    wall, total = wall_seconds(run), 0.0
    for start, stop in pairwise([*starts, len(run.events)]):
        begin, last = run.events[start].time, run.events[stop - 1].time
        # The lines of an attempt end where the next one began; a killed process leaves lines and no event after them.
        until = (run.events[stop].step or 0) if stop < len(run.events) else np.inf
        lines = int(np.searchsorted(run.metrics["step"][0], until, side="right")) if len(wall) else 0
        logged = run.events[starts[0]].time + wall[lines - 1] if lines else begin
        total += max(0.0, last - begin, logged - begin)
    return total
