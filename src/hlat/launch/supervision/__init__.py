"""Supervision of the processes of a run, wherever they are: waiting, hangs, root causes, restarts, events."""

from hlat.launch.supervision.monitor import ObservedHang
from hlat.launch.supervision.root_cause import RunOutcome, find_root_cause
from hlat.launch.supervision.run_events import RunEvents
from hlat.launch.supervision.running_ranks import RunningRanks
from hlat.launch.supervision.supervisor import Supervision, Supervisor, show_no_start
from hlat.launch.supervision.wait import SignalForwarder, wait_for_processes

__all__ = [
    "ObservedHang",
    "RunEvents",
    "RunOutcome",
    "RunningRanks",
    "SignalForwarder",
    "Supervision",
    "Supervisor",
    "find_root_cause",
    "show_no_start",
    "wait_for_processes",
]
