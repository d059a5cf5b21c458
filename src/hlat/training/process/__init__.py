"""Control of the training process: signals, deadline, run lock, garbage collection, timing and profiling."""

from hlat.training.process.deadline import Deadline
from hlat.training.process.gc_control import scheduled_gc
from hlat.training.process.lock import run_lock
from hlat.training.process.memory_error import explained_out_of_memory
from hlat.training.process.phase_timer import PhaseTimer
from hlat.training.process.profile import profile_steps
from hlat.training.process.signals import StopRequest
from hlat.training.process.snapshot_clock import SnapshotClock, report_tier_notes

__all__ = [
    "Deadline",
    "PhaseTimer",
    "SnapshotClock",
    "StopRequest",
    "explained_out_of_memory",
    "profile_steps",
    "report_tier_notes",
    "run_lock",
    "scheduled_gc",
]
