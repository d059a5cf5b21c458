"""What goes wrong with a run, how it is noticed, and what is done about it. Policies here wait for nothing.

What needs torch is imported when it is first asked for: a supervisor does without.
"""

from typing import TYPE_CHECKING

from hlat.resilience.anomalies import APPLY, AnomalyPolicy, Verdict
from hlat.resilience.beats import (
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
from hlat.resilience.goodput import PARTS, Goodput
from hlat.resilience.interval import best_interval, expected_goodput
from hlat.resilience.restarts import Decision, Failure, Kind, Restarts, Sizes
from hlat.resilience.slowness import Slow, Slowness
from hlat.resilience.stacks import ASK, main_stack, stacks_path
from hlat.resilience.watchdog import Hang, Watchdog
from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.resilience.copies import Copies, Mismatch
    from hlat.resilience.digests import digest
    from hlat.resilience.faults import STORAGE_FAULTS, Faults, InjectedFault
    from hlat.resilience.incident import Incident

_WITH_TORCH = {
    "copies": ("Copies", "Mismatch"),
    "digests": ("digest",),
    "faults": ("STORAGE_FAULTS", "Faults", "InjectedFault"),
    "incident": ("Incident",),
}

__getattr__ = lazily(__name__, _WITH_TORCH)


__all__ = [
    "APPLY",
    "ASK",
    "BEATS",
    "PARTS",
    "STORAGE_FAULTS",
    "AnomalyPolicy",
    "Copies",
    "Decision",
    "Failure",
    "Faults",
    "Goodput",
    "Hang",
    "Incident",
    "InjectedFault",
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
    "digest",
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
