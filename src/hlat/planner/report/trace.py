"""The simulated step as a Chrome trace: a row per pipeline rank, to be opened in chrome://tracing or Perfetto."""

from typing import Any

from hlat.planner.cost import Timeline
from hlat.planner.search import TrainingPlan, timeline

_MOST = 20_000  # passes: a viewer does not show more


def step_timeline(plan: TrainingPlan) -> Timeline:
    """The passes of one step; of a long one its beginning, as many micro-batches as a picture can show."""
    layout = plan.chosen.candidate
    count = layout.accumulation(plan.request.global_batch)
    most = max(layout.pipeline, _MOST // (2 * layout.pipeline * layout.virtual))
    if layout.virtual > 1:
        most = most // layout.pipeline * layout.pipeline
    return timeline(layout, min(count, most), plan.chosen.passes)


def chrome_trace(plan: TrainingPlan) -> dict[str, Any]:
    """Complete events in microseconds, as the trace event format wants them."""
    events: list[dict[str, Any]] = []
    for rank, passes in enumerate(step_timeline(plan).ranks):
        name = {"name": f"pipeline rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for one in passes:
            events.append(
                {
                    "name": f"{one.kind} {one.micro_batch}",
                    "cat": one.kind,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": one.start * 1e6,
                    "dur": (one.stop - one.start) * 1e6,
                    "args": {"stage": one.stage, "micro_batch": one.micro_batch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
