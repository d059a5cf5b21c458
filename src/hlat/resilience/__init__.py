"""Resilience: detection of failures in a run, and the decisions about them. Nothing here waits or blocks.

Modules that need torch are imported on first use, because the supervisor runs without torch.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.resilience.anomalies import APPLY, AnomalyPolicy, StepVerdict
    from hlat.resilience.checkpoint_interval import best_interval, expected_goodput
    from hlat.resilience.corruption_incident import CorruptionIncident
    from hlat.resilience.fault_injection import STORAGE_FAULTS, FaultInjector
    from hlat.resilience.goodput import GOODPUT_FILE, Goodput
    from hlat.resilience.heartbeat import (
        HEARTBEAT_FOLDER,
        HeartbeatReading,
        heartbeat_root,
        open_saver_progress,
        read_heartbeat,
        read_heartbeat_run_id,
        read_saver_silence,
        record_durable_step,
        record_run_id,
        record_saver,
        reset_durable_step,
        running_heartbeat,
        set_step_counter,
    )
    from hlat.resilience.replica_check import Mismatch, ReplicaCheck
    from hlat.resilience.restart_policy import (
        AttemptFailureKind,
        Failure,
        RestartDecision,
        RestartPolicy,
        WorldSizePolicy,
    )
    from hlat.resilience.stack_dumps import STACKS_SIGNAL, has_stacks, main_thread_stack, read_stacks
    from hlat.resilience.stragglers import Straggler, StragglerDetector
    from hlat.resilience.watchdog import Hang, Watchdog, find_hanging_ranks

__getattr__ = lazily(
    __name__,
    {
        "anomalies": (
            "APPLY",
            "AnomalyPolicy",
            "StepVerdict",
        ),
        "checkpoint_interval": (
            "best_interval",
            "expected_goodput",
        ),
        "corruption_incident": ("CorruptionIncident",),
        "fault_injection": (
            "FaultInjector",
            "STORAGE_FAULTS",
        ),
        "goodput": (
            "GOODPUT_FILE",
            "Goodput",
        ),
        "heartbeat": (
            "HEARTBEAT_FOLDER",
            "HeartbeatReading",
            "heartbeat_root",
            "running_heartbeat",
            "set_step_counter",
            "reset_durable_step",
            "open_saver_progress",
            "read_heartbeat_run_id",
            "read_heartbeat",
            "read_saver_silence",
            "record_saver",
            "record_durable_step",
            "record_run_id",
        ),
        "replica_check": (
            "ReplicaCheck",
            "Mismatch",
        ),
        "restart_policy": (
            "RestartDecision",
            "Failure",
            "AttemptFailureKind",
            "RestartPolicy",
            "WorldSizePolicy",
        ),
        "stack_dumps": (
            "STACKS_SIGNAL",
            "has_stacks",
            "main_thread_stack",
            "read_stacks",
        ),
        "stragglers": (
            "Straggler",
            "StragglerDetector",
        ),
        "watchdog": (
            "Hang",
            "Watchdog",
            "find_hanging_ranks",
        ),
    },
)

__all__ = [
    "APPLY",
    "GOODPUT_FILE",
    "HEARTBEAT_FOLDER",
    "STACKS_SIGNAL",
    "STORAGE_FAULTS",
    "AnomalyPolicy",
    "AttemptFailureKind",
    "CorruptionIncident",
    "Failure",
    "FaultInjector",
    "Goodput",
    "Hang",
    "HeartbeatReading",
    "Mismatch",
    "ReplicaCheck",
    "RestartDecision",
    "RestartPolicy",
    "StepVerdict",
    "Straggler",
    "StragglerDetector",
    "Watchdog",
    "WorldSizePolicy",
    "best_interval",
    "expected_goodput",
    "find_hanging_ranks",
    "has_stacks",
    "heartbeat_root",
    "main_thread_stack",
    "open_saver_progress",
    "read_heartbeat",
    "read_heartbeat_run_id",
    "read_saver_silence",
    "read_stacks",
    "record_durable_step",
    "record_run_id",
    "record_saver",
    "reset_durable_step",
    "running_heartbeat",
    "set_step_counter",
]
