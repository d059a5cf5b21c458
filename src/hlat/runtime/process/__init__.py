"""This process: its phase, clock, exit codes and log, and the status of other processes of the machine."""

from hlat.runtime.process.clock import machine_clock
from hlat.runtime.process.exit_codes import DEADLINE, INTERRUPTED, REQUEUE, STOP_CODES, STOPPING, stop_code
from hlat.runtime.process.phase import PHASES, current_phase, enter_phase, observed_phases
from hlat.runtime.process.process_status import LAUNCHER, is_running, is_stopped, session_lives
from hlat.runtime.process.rank_log import log_path, rank_log

__all__ = [
    "DEADLINE",
    "INTERRUPTED",
    "LAUNCHER",
    "PHASES",
    "REQUEUE",
    "STOPPING",
    "STOP_CODES",
    "current_phase",
    "enter_phase",
    "is_running",
    "is_stopped",
    "log_path",
    "machine_clock",
    "observed_phases",
    "rank_log",
    "session_lives",
    "stop_code",
]
