"""The cost model: time of compute, communication, pipeline and step, and the goodput of a run."""

from hlat.planner.cost.comm_bytes import exchanged_bytes
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.constants import Constants, load_constants
from hlat.planner.cost.executed_flops import executed_flops
from hlat.planner.cost.framework_profile import hlat_profile
from hlat.planner.cost.goodput import (
    DETECTION_SECONDS,
    HOST_COPY_RATE,
    SOFTWARE_FAILURES_PER_DAY,
    STORE_RATE_LIMIT,
    STORE_RATE_PER_INSTANCE,
    Reliability,
    predict_reliability,
    simulate_goodput,
    storage_rate,
)
from hlat.planner.cost.operation_time import OperationTimes
from hlat.planner.cost.pipeline_sim import StageTimes, Timeline, simulate_pipeline
from hlat.planner.cost.ratio_interval import (
    INTERVAL_SHARE,
    RatioInterval,
    ratio_between,
    shipped_interval,
    undecided_ratio,
)
from hlat.planner.cost.step_time import STEP_COMPONENTS, StepTimes, step_times

__all__ = [
    "DETECTION_SECONDS",
    "HOST_COPY_RATE",
    "INTERVAL_SHARE",
    "SOFTWARE_FAILURES_PER_DAY",
    "STEP_COMPONENTS",
    "STORE_RATE_LIMIT",
    "STORE_RATE_PER_INSTANCE",
    "Constants",
    "OperationTimes",
    "RatioInterval",
    "Reliability",
    "StageTimes",
    "StepTimes",
    "Timeline",
    "comm_times",
    "exchanged_bytes",
    "executed_flops",
    "hlat_profile",
    "load_constants",
    "predict_reliability",
    "ratio_between",
    "shipped_interval",
    "simulate_goodput",
    "simulate_pipeline",
    "step_times",
    "storage_rate",
    "undecided_ratio",
]
