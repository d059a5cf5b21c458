"""Heartbeats for tests of what is made of them."""

from dataclasses import replace

from hlat.resilience import HeartbeatReading

PLAIN = HeartbeatReading(
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
    location="training/step.py:36 accumulate_gradients",
    saver=None,
    seconds={},
    longest={},
    busy={},
)


def reading(rank: int = 0, **fields: object) -> HeartbeatReading:
    """The heartbeat of a rank whose process id is 100 and its number."""
    return replace(PLAIN, rank=rank, pid=100 + rank, **fields)
