"""Stack sampler: a thread that inspects the stack of the main thread 20 times a second.

stack of the main thread --innermost frames--> True if it waits for another rank; its innermost location in hlat

A slow rank works while the others wait for it; a hanging rank is the one that does not wait. A sample takes a few
microseconds. While a process is stopped, or a call holds the GIL, no samples are taken and ``alive_at`` stays.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import Protocol

_INTERVAL = 0.05  # seconds
_WAITING_FILE = "hlat/runtime/distributed/waiting.py"  # its functions wait for other ranks
_COMMUNICATION_FILES = (
    "hlat/runtime/distributed/async_max.py",
    "hlat/runtime/distributed/host_collectives.py",
    _WAITING_FILE,
)


class SampleObserver(Protocol):
    """Receiver of samples."""

    def record_sample(self, waiting: bool, location: str, seconds: float) -> None:
        """Record a sample.

        Args:
            waiting: True if the rank waits for another one.
            location: innermost frame in hlat, see ``find_location``.
            seconds: seconds since the last sample.
        """


@contextmanager
def sample_main_thread(observer: SampleObserver) -> Iterator[None]:
    """Sample the main thread inside the block."""
    stop = threading.Event()
    thread = threading.Thread(target=_sample, args=(observer, stop), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sample(observer: SampleObserver, stop: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None, "the main thread runs"
    last = time.monotonic()
    while not stop.wait(_INTERVAL):
        frame = sys._current_frames().get(main)
        now = time.monotonic()
        observer.record_sample(
            frame is not None and is_waiting(frame), "" if frame is None else find_location(frame), now - last
        )
        del frame  # a reference would keep the frame's tensors alive
        last = now


def is_waiting(frame: FrameType) -> bool:
    """Return True if the innermost code of a stack waits for other ranks: in a collective, a message or a vote.

    If it is inside Python's ``threading``, its caller decides.
    """
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    file = PurePath(frame.f_code.co_filename).as_posix()
    if "/torch/distributed/" in file:
        return "/torch/distributed/tensor/" not in file  # DTensor, which computes
    return file.endswith(_COMMUNICATION_FILES)


def find_location(frame: FrameType) -> str:
    """Return the innermost frame in hlat, as ``training/step.py:52 update``; empty if there is none."""
    innermost: FrameType | None = frame
    while innermost is not None:
        file = PurePath(innermost.f_code.co_filename).as_posix()
        if "/hlat/" in file and not file.endswith(_WAITING_FILE):
            return f"{file.rpartition('/hlat/')[2]}:{innermost.f_lineno} {innermost.f_code.co_name}"
        innermost = innermost.f_back
    return ""
