"""Stages of this process before its first step, for displays: importing, preparing data, building the model, ...

Code that begins a part of the start calls ``enter_stage``; a display observes the names, which are shown as they are.
The phases of a step are another matter (``hlat.runtime.process.phase``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

StageObserver = Callable[[str], None]

_observers: list[StageObserver] = []


def enter_stage(name: str) -> None:
    """Begin a part of the start, which ends the one before; the empty name ends the start."""
    for observer in list(_observers):
        observer(name)


@contextmanager
def observe_stages(observer: StageObserver) -> Iterator[None]:
    """Call an observer with each stage that begins within the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
