"""Resilience: detection of failures in a run, and the decisions about them. Nothing here waits or blocks.

Modules that need torch are imported on first use, because the supervisor runs without torch.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.resilience.anomalies import *
    from hlat.resilience.fault_injection import *
    from hlat.resilience.goodput import *
    from hlat.resilience.heartbeat import *
    from hlat.resilience.replica_check import *
    from hlat.resilience.restart_policy import *
    from hlat.resilience.watchdog import *

__getattr__ = lazily(
    __name__,
    {
        "anomalies": "APPLY AnomalyPolicy SkippedSamples StepVerdict",
        "fault_injection": "FaultInjector STORAGE_FAULTS",
        "goodput": "GOODPUT_FILE Goodput best_interval expected_goodput",
        "heartbeat": (
            "HEARTBEAT_FOLDER HeartbeatReading STACKS_SIGNAL has_stacks heartbeat_root main_thread_stack "
            "open_saver_progress read_heartbeat read_heartbeat_run_id read_saver_silence read_stacks "
            "record_durable_step record_run_id record_saver reset_durable_step running_heartbeat "
            "set_step_counter"
        ),
        "replica_check": "CorruptionIncident Mismatch ReplicaCheck",
        "restart_policy": "AttemptFailureKind Failure RestartDecision RestartPolicy WorldSizePolicy",
        "watchdog": "Hang Straggler StragglerDetector Watchdog find_hanging_ranks",
    },
)
