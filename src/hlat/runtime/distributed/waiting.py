"""Waiting for other processes without being deaf: signals are heard within a second.

    a call into C++ that may last  --on a thread of its own--> its result, or its error
    a collective in the background --in slices of a second---> done, or its error

Python runs the handler of a signal between two instructions of the main thread. A main thread that waits inside a
library runs none until the library returns, which may be in ten minutes, or never.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")

WAIT_SLICE = timedelta(seconds=1)
"""Interval at which a waiting process hears signals."""


class _Outcome(Generic[T]):
    """What a call gave, once it has ended."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None

    def find(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error = error

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def call_interruptibly(call: Callable[[], T]) -> T:
    """Do a call that may wait for other processes for long, and hear signals meanwhile. Returns its result.

    The call runs on a thread of its own. A handler that raises, as that of Ctrl-C does, leaves it there: nothing can
    end it but the end of the process, which does not wait for it.

    Raises:
        Exception: what the call raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()  # no handler runs here
    outcome = _Outcome(call)
    thread = threading.Thread(target=outcome.find, name="waiting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(WAIT_SLICE.total_seconds())
    return outcome.get()


def wait_for_work(work: dist.Work | None) -> None:
    """Wait for a collective of gloo that runs in the background, in slices.

    Not for messages between two ranks: those gloo gives up at the end of the first slice.

    Raises:
        RuntimeError: it failed; a peer has gone, for one.
    """
    assert work is not None, "this process is a member of the group"
    while True:
        try:
            work.wait(WAIT_SLICE)
        except RuntimeError:
            if not work.is_completed():  # the slice has passed, and nothing else has happened
                continue
            work.wait()
        return
