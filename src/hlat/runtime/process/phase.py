"""Current phase of this process within a training step, by name.

    data -> forward <-> backward -> reduce -> optimizer -> saving? checkpoint? evaluation? -> data ...

Code that begins a phase calls ``enter_phase``, which also ends the previous phase. Observers (phase timer, heartbeats,
fault injection) are called at every change, on the thread that computes.
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
    "saving",
    "checkpoint",
    "between",
    "end",
)
"""Names of the phases.

``start``: until the first step; ``device``: waiting for launched kernels; ``saving``: waiting for a save that another
process writes; ``between``: the rest of a step.
"""

PhaseObserver = Callable[[str], None]

_current = PHASES[0]
_observers: list[PhaseObserver] = []


def current_phase() -> str:
    """Return the phase that this process is in."""
    return _current


def enter_phase(name: str) -> None:
    """Begin a phase; no effect if it is the current one."""
    global _current  # noqa: PLW0603  (one phase per process)
    assert name in PHASES, name
    if name == _current:
        return
    _current = name
    for observer in _observers:
        observer(name)


@contextmanager
def observe_phases(observer: PhaseObserver) -> Iterator[None]:
    """Call an observer with each phase that begins within the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
