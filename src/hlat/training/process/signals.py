"""Graceful stop: the first signal requests a stop after the current step, the second stops at once.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1, deadline --> stop request --vote of all ranks--> step after which all ranks stop

A signal may reach a single rank, or each rank in a different step, and clocks differ. All ranks vote in every step and
stop after the same one.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from hlat.runtime.distributed.async_max import AsyncMax
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.process.exit_codes import STOP_SIGNALS

_DEADLINE = 1 << 16  # value of the deadline in the vote; the other values are signal numbers

# A scheduler signals every process of a job: a rank receives the signal itself, and again forwarded by its launcher.
_SAME_REQUEST = 1.0  # seconds within which further signals count as the first one


def _never() -> bool:
    return False


class StopRequest:
    """Context manager in which stop signals set ``signal`` instead of ending the process; ignored signals stay ignored.

    A second signal raises KeyboardInterrupt wherever the program is. Outside the main thread, to which Python delivers
    no signals, nothing changes.

    Args:
        ranks: the processes of the run.
        on_request: called with the name of the first signal.
        is_over: returns True if the deadline has passed.
        clock: seconds, monotonic.
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

    def start_vote(self) -> None:
        """Start the vote of all ranks on stopping, before a step. Does not wait."""
        if not self._alone:
            self._vote.start(self._request())

    def vote_result(self) -> str | None:
        """Return the result of the vote, after the step: a signal's name, ``deadline``, or None to continue.

        The same on every rank. With several ranks, a signal that arrives during the step counts after the next one.
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
            # Ignored signals stay ignored: nohup ignores SIGHUP, a shell's background job SIGINT.
            handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in handled}
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
