"""Heartbeat readings for tests of the policies that use them."""

from dataclasses import replace

from hlat.resilience import HeartbeatReading

DEFAULT = HeartbeatReading(
    rank=0,
    pid=100,
    step=6,
    phase="forward",
    since=0.0,
    start_step=0,
    first_step_at=0.0,
    durable_step=None,
    durable_seconds=0.0,
    alive_at=0.0,
    waiting=False,
    location="training/loop.py:36 accumulate_gradients",
    saver=None,
    saves=0,
    progress_at=-1e9,
    blocked=False,
    seconds={},
    longest={},
    busy={},
)


def reading(rank: int = 0, **fields: object) -> HeartbeatReading:
    """Return a heartbeat reading of a rank, with process id 100 + rank."""
    return replace(DEFAULT, rank=rank, pid=100 + rank, **fields)
