"""Wait for other processes while signals are still handled, within a second.

    a blocking C++ call            --on a thread of its own--> its result, or its error
    a collective in the background --in slices of a second---> done, or its error

Python runs signal handlers between two bytecode instructions of the main thread. A main thread that waits inside a
library runs none until the library returns, which may take ten minutes, or forever.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")

WAIT_SLICE = timedelta(seconds=1)
"""Interval at which a waiting process handles signals."""


class _Outcome(Generic[T]):
    """Result or error of a call on another thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error = error

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def call_interruptibly(call: Callable[[], T], timeout: timedelta | None = None) -> T:
    """Run a call that may block for long, and handle signals meanwhile; return its result.

    The call runs on a daemon thread. If a signal handler raises, as that of Ctrl-C does, or the time is over, the
    thread stays blocked until the process ends, which does not wait for it.

    Args:
        call: the call.
        timeout: time after which it is given up; None to wait for ever.

    Raises:
        TimeoutError: the call took longer.
        Exception: the error of the call.
    """
    if timeout is None and threading.current_thread() is not threading.main_thread():
        return call()  # signal handlers run on the main thread only
    outcome = _Outcome(call)
    thread = threading.Thread(target=outcome.run, name="waiting", daemon=True)
    thread.start()
    begin = time.monotonic()
    while thread.is_alive():
        thread.join(WAIT_SLICE.total_seconds())
        if timeout is not None and thread.is_alive() and time.monotonic() - begin > timeout.total_seconds():
            raise TimeoutError(f"no answer within {timeout.total_seconds():g} s")
    return outcome.get()


def wait_for_work(work: dist.Work | None) -> None:
    """Wait for an asynchronous gloo collective, in slices.

    This does not work for messages between two ranks: gloo aborts those at the end of the first slice.

    Raises:
        RuntimeError: the collective failed, for example because a peer has died.
    """
    assert work is not None, "this process is a member of the group"
    while True:
        try:
            work.wait(WAIT_SLICE)
        except RuntimeError:
            if not work.is_completed():  # only the slice has timed out
                continue
            work.wait()
        return
