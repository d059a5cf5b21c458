"""The cost model: compute, communication, pipeline and step time, and the goodput of a whole run."""

from hlat.planner.cost.comm_bytes import exchanged_bytes
from hlat.planner.cost.constants import load_constants
from hlat.planner.cost.executed_flops import executed_flops
from hlat.planner.cost.framework_profile import software_of
from hlat.planner.cost.goodput import (
    COPY_RATE,
    SOFTWARE_PER_DAY,
    STORE_MOST,
    STORE_RATE,
    Reliability,
    reliability,
    simulate_goodput,
)
from hlat.planner.cost.pipeline_sim import StageTimes, Timeline, simulate
from hlat.planner.cost.step_time import PARTS, StepTimes, step_times

__all__ = [
    "COPY_RATE",
    "PARTS",
    "SOFTWARE_PER_DAY",
    "STORE_MOST",
    "STORE_RATE",
    "Reliability",
    "StageTimes",
    "StepTimes",
    "Timeline",
    "exchanged_bytes",
    "executed_flops",
    "load_constants",
    "reliability",
    "simulate",
    "simulate_goodput",
    "software_of",
    "step_times",
]
