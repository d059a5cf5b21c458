"""Stopping politely: the first signal asks for an end after the current step, the second ends at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal has gone


class StopRequest:
    """Context in which SIGINT, SIGTERM and SIGHUP set ``signal`` instead of ending the process, unless ignored.

    A second one raises KeyboardInterrupt wherever the program is. Outside the main thread, where Python delivers
    no signals, nothing is changed.
    """

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._on_request = on_request
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            # What was ignored stays so: nohup ignores SIGHUP, a shell's background job SIGINT.
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._on_request(self.signal.name)
