"""Stopping politely: the first signal asks for an end after the current step, the second ends at once.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1, the deadline --> a request --vote of all ranks--> the step after which all stop

A signal may reach one rank only, or each in another step; and clocks differ. All ranks vote in every step and stop
after the same one.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from hlat.runtime.distributed import AsyncMax, HostGroup
from hlat.runtime.process import STOP_SIGNALS

_DEADLINE = 1 << 16  # its number in the vote, beside those of signals

# A scheduler signals every process of a job: a rank hears it itself, and again from its launcher, which passes it on.
_SAME_REQUEST = 1.0  # seconds within which another signal is still the first request


def _never() -> bool:
    return False


class StopRequest:
    """Context in which the signals that ask a run to stop set ``signal`` instead of ending the process, unless ignored.

    A second one raises KeyboardInterrupt wherever the program is. Outside the main thread, where Python delivers
    no signals, nothing is changed.

    Args:
        ranks: the processes of the run.
        on_request: told the name of the first signal.
        is_over: whether the deadline has come.
        clock: seconds.
    """

    def __init__(
        self,
        ranks: HostGroup,
        on_request: Callable[[str], None],
        is_over: Callable[[], bool] = _never,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.signal: signal.Signals | None = None
        self._is_over = is_over
        self._on_request = on_request
        self._alone = ranks.world == 1
        self._clock, self._at = clock, 0.0
        self._vote = AsyncMax(ranks)
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def ask(self) -> None:
        """Before a step: ask the other ranks whether one of them was signalled. Waits for nobody."""
        if not self._alone:
            self._vote.start(self._request())

    def agreed(self) -> str | None:
        """After the step: what ends the run now, the same on every rank: a signal's name, ``deadline``, None to go on.

        What came during the step is heard after the next one where there are several ranks.
        """
        number = self._request() if self._alone else self._vote.result()
        if number == _DEADLINE:
            return "deadline"
        return signal.Signals(number).name if number else None

    def _request(self) -> int:
        if self.signal is not None:
            return self.signal
        return _DEADLINE if self._is_over() else 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            # What was ignored stays so: nohup ignores SIGHUP, a shell's background job SIGINT.
            heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
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
