"""This process: phase, clock, exit codes, log, output; and the status of other processes of the machine."""

from hlat.runtime.process.appended_file import AppendedFile
from hlat.runtime.process.clock import machine_clock
from hlat.runtime.process.exit_codes import (
    DEADLINE_ENV,
    INTERRUPTED_MESSAGE,
    REQUEUE_CODE,
    STOP_EXIT_CODES,
    STOP_SIGNALS,
    stop_exit_code,
)
from hlat.runtime.process.interrupts import after_start, end_at_sigterm, raise_interrupts
from hlat.runtime.process.json_output import json_line, print_json_lines, prints_json
from hlat.runtime.process.lossy_output import check_result, let_output_be_lost, lossy_stream, lost_output
from hlat.runtime.process.main_thread_signal import signal_main_thread
from hlat.runtime.process.phase import PHASES, current_phase, enter_phase, observe_phases
from hlat.runtime.process.process_status import LAUNCHER_ENV, is_running, is_stopped, session_is_alive
from hlat.runtime.process.progress import (
    ProgressRecord,
    advance,
    begin_progress,
    blocking_call,
    record_progress_in,
)
from hlat.runtime.process.rank_log import log_path, rank_log
from hlat.runtime.process.startup_stage import enter_stage, observe_stages
from hlat.runtime.process.verbosity import VERBOSE_ENV, be_verbose, is_verbose

__all__ = [
    "DEADLINE_ENV",
    "INTERRUPTED_MESSAGE",
    "LAUNCHER_ENV",
    "PHASES",
    "REQUEUE_CODE",
    "STOP_EXIT_CODES",
    "STOP_SIGNALS",
    "VERBOSE_ENV",
    "AppendedFile",
    "ProgressRecord",
    "advance",
    "after_start",
    "be_verbose",
    "begin_progress",
    "blocking_call",
    "check_result",
    "current_phase",
    "end_at_sigterm",
    "enter_phase",
    "enter_stage",
    "is_running",
    "is_stopped",
    "is_verbose",
    "json_line",
    "let_output_be_lost",
    "log_path",
    "lossy_stream",
    "lost_output",
    "machine_clock",
    "observe_phases",
    "observe_stages",
    "print_json_lines",
    "prints_json",
    "raise_interrupts",
    "rank_log",
    "record_progress_in",
    "session_is_alive",
    "signal_main_thread",
    "stop_exit_code",
]
