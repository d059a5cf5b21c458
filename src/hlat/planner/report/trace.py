"""Chrome trace of a simulated step: one row per pipeline rank, for chrome://tracing or Perfetto."""

from typing import Any

from hlat.planner.cost.pipeline_sim import Timeline
from hlat.planner.search.plan import TrainingPlan
from hlat.planner.search.search import timeline

_MAX_PASSES = 20_000  # more than that, viewers do not show


def step_timeline(plan: TrainingPlan) -> Timeline:
    """Passes of one step; of a long step, as many micro-batches from its start as a viewer can show."""
    layout = plan.chosen.candidate
    count = layout.accumulation(plan.request.global_batch)
    limit = max(layout.pipeline, _MAX_PASSES // (2 * layout.pipeline * layout.virtual))
    if layout.virtual > 1:
        limit = limit // layout.pipeline * layout.pipeline
    return timeline(layout, min(count, limit), plan.chosen.stage_times)


def chrome_trace(plan: TrainingPlan) -> dict[str, Any]:
    """Complete events of the trace event format, in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, passes in enumerate(step_timeline(plan).ranks):
        name = {"name": f"pipeline rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for each in passes:
            events.append(
                {
                    "name": f"{each.kind} {each.micro_batch}",
                    "cat": each.kind,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": each.start * 1e6,
                    "dur": (each.stop - each.start) * 1e6,
                    "args": {"stage": each.stage, "micro_batch": each.micro_batch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
