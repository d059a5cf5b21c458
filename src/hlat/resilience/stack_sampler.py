"""Looking at the thread that computes, twenty times a second, from another thread of the same process.

the stack of the main thread --innermost frames--> does it wait for another rank? where in hlat is it?

A rank that is slow works while the others wait for it; a rank that hangs is the one that does not wait. The look costs
some microseconds. A process that cannot be looked at any more, being stopped or inside something that keeps Python's
lock, is known by that: its ``alive_at`` stays behind.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import Protocol

_EVERY = 0.05  # seconds
_WAITING = "hlat/runtime/distributed/waiting.py"  # called by whoever waits for other ranks
_TALK = ("hlat/runtime/distributed/async_max.py", "hlat/runtime/distributed/host_collectives.py", _WAITING)


class Sampled(Protocol):
    """What is told of every look."""

    def look(self, waiting: bool, where: str, seconds: float) -> None:
        """Whether the rank waits for another one, where in hlat it is, and the seconds since the look before."""


@contextmanager
def sampled(beat: Sampled) -> Iterator[None]:
    """Have the main thread looked at until the end of the block."""
    over = threading.Event()
    thread = threading.Thread(target=_sample, args=(beat, over), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _sample(beat: Sampled, over: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    before = time.monotonic()
    while not over.wait(_EVERY):
        frame = sys._current_frames().get(main)
        now = time.monotonic()
        beat.look(frame is not None and is_waiting(frame), "" if frame is None else where(frame), now - before)
        del frame  # or the tensors of that moment would live on
        before = now


def is_waiting(frame: FrameType) -> bool:
    """Whether the code at the end of a stack waits for other ranks: a collective, a message, a vote.

    A wait may be inside Python's own ``threading``: then whoever called that decides.
    """
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    file = PurePath(frame.f_code.co_filename).as_posix()
    if "/torch/distributed/" in file:
        return "/torch/distributed/tensor/" not in file  # which computes
    return file.endswith(_TALK)


def where(frame: FrameType) -> str:
    """The innermost place in hlat, as in ``training/step.py:52 update``; empty where there is none."""
    innermost: FrameType | None = frame
    while innermost is not None:
        file = PurePath(innermost.f_code.co_filename).as_posix()
        if "/hlat/" in file and not file.endswith(_WAITING):
            return f"{file.rpartition('/hlat/')[2]}:{innermost.f_lineno} {innermost.f_code.co_name}"
        innermost = innermost.f_back
    return ""
