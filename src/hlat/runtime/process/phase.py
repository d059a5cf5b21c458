"""What this process is doing right now, by name.

    data -> forward <-> backward -> reduce -> optimizer -> checkpoint? evaluation? -> data ...

Whoever begins a part of a step says so with ``enter_phase``; the phase before it ends there. Observers (the stopwatch,
heartbeats, faults that are injected) are told of every change, on the thread that computes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "device",
    "evaluation",
    "checkpoint",
    "between",
    "end",
)
"""``start`` until the first step; ``device`` waits for what was launched there; ``between`` is the rest of a step."""

PhaseObserver = Callable[[str], None]

_current = PHASES[0]
_observers: list[PhaseObserver] = []


def current_phase() -> str:
    """The phase that this process is in."""
    return _current


def enter_phase(name: str) -> None:
    """Begin a phase; nothing where it has begun already."""
    global _current  # noqa: PLW0603  (what a process does there is one of)
    assert name in PHASES, name
    if name == _current:
        return
    _current = name
    for observer in _observers:
        observer(name)


@contextmanager
def observe_phases(observer: PhaseObserver) -> Iterator[None]:
    """Have an observer told of each phase that begins."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
