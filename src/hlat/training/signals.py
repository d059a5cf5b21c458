"""Stopping politely: the first signal asks for an end after the current step, the second ends at once.

A signal may reach one rank only, or each in another step. All ranks vote in every step and stop after the same one.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from hlat.runtime import Ranks, Vote

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal has gone

# A scheduler signals every process of a job: a rank hears it itself, and again from its launcher, which passes it on.
_SAME_REQUEST = 1.0  # seconds within which another signal is still the first request


class StopRequest:
    """Context in which SIGINT, SIGTERM and SIGHUP set ``signal`` instead of ending the process, unless ignored.

    A second one raises KeyboardInterrupt wherever the program is. Outside the main thread, where Python delivers
    no signals, nothing is changed.
    """

    def __init__(
        self, ranks: Ranks, on_request: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.signal: signal.Signals | None = None
        self._on_request = on_request
        self._alone = ranks.world == 1
        self._clock, self._at = clock, 0.0
        self._vote = Vote(ranks)
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def ask(self) -> None:
        """Before a step: ask the other ranks whether one of them was signalled. Waits for nobody."""
        if not self._alone:
            self._vote.cast(self.signal or 0)

    def agreed(self) -> signal.Signals | None:
        """After the step: the signal that ends the run now, the same on every rank; None to go on.

        One that came during the step is heard after the next one where there are several ranks.
        """
        if self._alone:
            return self.signal
        number = self._vote.result()
        return signal.Signals(number) if number else None

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
            if self._clock() - self._at < _SAME_REQUEST:
                return
            raise KeyboardInterrupt
        self._at = self._clock()
        self.signal = signal.Signals(number)
        self._on_request(self.signal.name)
