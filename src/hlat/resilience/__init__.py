"""What goes wrong with a run, how it is noticed, and what is done about it. Policies here wait for nothing.

What needs torch is imported when it is first asked for: a supervisor does without.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.resilience.anomalies import APPLY, AnomalyPolicy, Verdict
    from hlat.resilience.checkpoint_interval import best_interval, expected_goodput
    from hlat.resilience.corruption_incident import Incident
    from hlat.resilience.fault_injection import STORAGE_FAULTS, Faults
    from hlat.resilience.goodput import Goodput
    from hlat.resilience.heartbeat import (
        BEATS,
        Reading,
        beating,
        count_steps,
        fell_back,
        number_of_run,
        read_beat,
        saves_beside,
        secured,
        trains_in,
    )
    from hlat.resilience.replica_check import Copies, Mismatch
    from hlat.resilience.restart_policy import Decision, Failure, Kind, Restarts, Sizes
    from hlat.resilience.stack_dumps import ASK, main_stack, stacks_path
    from hlat.resilience.stragglers import Slow, Slowness
    from hlat.resilience.watchdog import Hang, Watchdog

__getattr__ = lazily(
    __name__,
    {
        "anomalies": (
            "APPLY",
            "AnomalyPolicy",
            "Verdict",
        ),
        "checkpoint_interval": (
            "best_interval",
            "expected_goodput",
        ),
        "corruption_incident": ("Incident",),
        "fault_injection": (
            "Faults",
            "STORAGE_FAULTS",
        ),
        "goodput": ("Goodput",),
        "heartbeat": (
            "BEATS",
            "Reading",
            "beating",
            "count_steps",
            "fell_back",
            "number_of_run",
            "read_beat",
            "saves_beside",
            "secured",
            "trains_in",
        ),
        "replica_check": (
            "Copies",
            "Mismatch",
        ),
        "restart_policy": (
            "Decision",
            "Failure",
            "Kind",
            "Restarts",
            "Sizes",
        ),
        "stack_dumps": (
            "ASK",
            "main_stack",
            "stacks_path",
        ),
        "stragglers": (
            "Slow",
            "Slowness",
        ),
        "watchdog": (
            "Hang",
            "Watchdog",
        ),
    },
)

__all__ = [
    "APPLY",
    "ASK",
    "BEATS",
    "STORAGE_FAULTS",
    "AnomalyPolicy",
    "Copies",
    "Decision",
    "Failure",
    "Faults",
    "Goodput",
    "Hang",
    "Incident",
    "Kind",
    "Mismatch",
    "Reading",
    "Restarts",
    "Sizes",
    "Slow",
    "Slowness",
    "Verdict",
    "Watchdog",
    "beating",
    "best_interval",
    "count_steps",
    "expected_goodput",
    "fell_back",
    "main_stack",
    "number_of_run",
    "read_beat",
    "saves_beside",
    "secured",
    "stacks_path",
    "trains_in",
]
