"""Heartbeats for tests of what is made of them."""

from dataclasses import replace

from hlat.resilience import Reading

PLAIN = Reading(
    rank=0,
    pid=100,
    step=6,
    phase="forward",
    since=0.0,
    began=0,
    first_step_at=0.0,
    saved=None,
    saved_seconds=0.0,
    alive_at=0.0,
    waiting=False,
    where="training/step.py:36 accumulate_gradients",
    saver=None,
    seconds={},
    longest={},
    busy={},
)


def reading(rank: int = 0, **fields: object) -> Reading:
    """The heartbeat of a rank whose process id is 100 and its number."""
    return replace(PLAIN, rank=rank, pid=100 + rank, **fields)
