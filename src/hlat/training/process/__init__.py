"""The training process itself: signals, deadline, lock, garbage collection, timing and profiling."""

from hlat.training.process.deadline import Deadline
from hlat.training.process.gc_control import controlled_garbage
from hlat.training.process.lock import run_lock
from hlat.training.process.phase_timer import Stopwatch
from hlat.training.process.profile import profiled
from hlat.training.process.signals import StopRequest
from hlat.training.process.snapshot_clock import SnapshotClock, tell_notes

__all__ = [
    "Deadline",
    "SnapshotClock",
    "StopRequest",
    "Stopwatch",
    "controlled_garbage",
    "profiled",
    "run_lock",
    "tell_notes",
]
