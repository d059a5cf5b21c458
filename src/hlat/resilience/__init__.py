"""Resilience: detection of failures in a run, and the decisions about them. Nothing here waits or blocks.

Modules that need torch are imported on first use, because the supervisor runs without torch.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.resilience.anomalies import APPLY as APPLY
    from hlat.resilience.anomalies import AnomalyPolicy as AnomalyPolicy
    from hlat.resilience.anomalies import StepVerdict as StepVerdict
    from hlat.resilience.fault_injection import STORAGE_FAULTS as STORAGE_FAULTS
    from hlat.resilience.fault_injection import FaultInjector as FaultInjector
    from hlat.resilience.goodput import GOODPUT_FILE as GOODPUT_FILE
    from hlat.resilience.goodput import Goodput as Goodput
    from hlat.resilience.goodput import best_interval as best_interval
    from hlat.resilience.goodput import expected_goodput as expected_goodput
    from hlat.resilience.heartbeat import HEARTBEAT_FOLDER as HEARTBEAT_FOLDER
    from hlat.resilience.heartbeat import STACKS_SIGNAL as STACKS_SIGNAL
    from hlat.resilience.heartbeat import HeartbeatReading as HeartbeatReading
    from hlat.resilience.heartbeat import has_stacks as has_stacks
    from hlat.resilience.heartbeat import heartbeat_root as heartbeat_root
    from hlat.resilience.heartbeat import main_thread_stack as main_thread_stack
    from hlat.resilience.heartbeat import open_saver_progress as open_saver_progress
    from hlat.resilience.heartbeat import read_heartbeat as read_heartbeat
    from hlat.resilience.heartbeat import read_heartbeat_run_id as read_heartbeat_run_id
    from hlat.resilience.heartbeat import read_saver_silence as read_saver_silence
    from hlat.resilience.heartbeat import read_stacks as read_stacks
    from hlat.resilience.heartbeat import record_durable_step as record_durable_step
    from hlat.resilience.heartbeat import record_run_id as record_run_id
    from hlat.resilience.heartbeat import record_saver as record_saver
    from hlat.resilience.heartbeat import reset_durable_step as reset_durable_step
    from hlat.resilience.heartbeat import running_heartbeat as running_heartbeat
    from hlat.resilience.heartbeat import set_step_counter as set_step_counter
    from hlat.resilience.replica_check import CorruptionIncident as CorruptionIncident
    from hlat.resilience.replica_check import Mismatch as Mismatch
    from hlat.resilience.replica_check import ReplicaCheck as ReplicaCheck
    from hlat.resilience.restart_policy import AttemptFailureKind as AttemptFailureKind
    from hlat.resilience.restart_policy import Failure as Failure
    from hlat.resilience.restart_policy import RestartDecision as RestartDecision
    from hlat.resilience.restart_policy import RestartPolicy as RestartPolicy
    from hlat.resilience.restart_policy import WorldSizePolicy as WorldSizePolicy
    from hlat.resilience.watchdog import Hang as Hang
    from hlat.resilience.watchdog import Straggler as Straggler
    from hlat.resilience.watchdog import StragglerDetector as StragglerDetector
    from hlat.resilience.watchdog import Watchdog as Watchdog
    from hlat.resilience.watchdog import find_hanging_ranks as find_hanging_ranks

__getattr__ = lazily(
    __name__,
    {
        "anomalies": "APPLY AnomalyPolicy StepVerdict",
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
