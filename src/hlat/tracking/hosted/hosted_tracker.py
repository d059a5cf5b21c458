"""Hosted tracker, on the side of the run: hands records to a helper process and never waits for it.

    log --> bounded queue --socket, without blocking--> helper process (worker.py) --> service
                 | full, or the process has ended: the record is dropped and counted
    notes <----- replies of the helper process

At the end of a run that ended by itself, the records that are left may take ``flush_seconds``; then the helper process
is killed. After an error nothing is waited for: the helper process has the same time on its own.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hlat.tracking.hosted.base import HostedRun
from hlat.tracking.hosted.table import HOSTED
from hlat.tracking.metrics import Metrics
from hlat.tracking.outputs import TrackerNote
from hlat.tracking.tensorboard.writer import scalars

_MOST_RECORDS = 10_000  # in the queue: a line of metrics is about 1 KB
_RECEIVED = 1 << 16
_REAP_SECONDS = 2.0


class HostedTracker:
    """Output of metrics to a tracking service.

    Args:
        name: name of the tracker in ``HOSTED``.
        run: the run.
        flush_seconds: time limit of ``close``.
        most_records: size of the queue.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        run: HostedRun,
        flush_seconds: float,
        most_records: int = _MOST_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._flush_seconds, self._most, self._clock = name, flush_seconds, most_records, clock
        self._queue: deque[bytes] = deque()
        self._offset = 0  # bytes of the first record that have been sent
        self._received = b""
        self._notes: list[TrackerNote] = []
        self._records = self._done = 0  # lines of metrics given to this tracker, and those that the service has
        self._has_told = self._is_closed = self._has_ended = self._ended_in_order = False
        ours, theirs = socket.socketpair()
        program = f"import sys; sys.path[:] = {sys.path!r}; from {_WORKER} import main; main(int(sys.argv[1]))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a library may print what no log should have; errors are reported
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket = ours
        start = {
            "tracker": name,
            "client": HOSTED[name].client,
            "name": run.name,
            "run_dir": str(run.run_dir),
            "recipe": run.recipe,
            "settings": run.settings,
            "flush_seconds": flush_seconds,
        }
        self._queue.append(_line(start))
        self._pump()

    def log(self, metrics: Metrics) -> None:
        """Queue the scalars of a step; returns at once."""
        self._records += 1
        if self._has_ended:
            self._tell(_ENDED)
        elif len(self._queue) >= self._most:
            self._tell(f"it does not keep up: {self._most} lines of metrics are waiting")
        else:
            self._queue.append(_line({"step": metrics["step"], "values": scalars(metrics)}))
        self._pump()

    def rewind(self, step: int) -> None:
        """Do nothing: a service does not forget. Steps that it has are not logged again."""

    def notes(self) -> list[TrackerNote]:
        """Return and clear what has to be reported."""
        notes, self._notes = self._notes, []
        return notes

    def close(self, failed: bool = False) -> None:
        """End the helper process; wait for it, for a limited time, unless the run has failed."""
        if self._is_closed:
            return
        self._is_closed = True
        if failed:
            self._pump()
            self._socket.close()
            return
        self._flush()
        if not self._has_ended:
            self._kill()
            self._tell(f"it had not ended {self._flush_seconds:g} s after the run")
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        if lost := self._records - self._done:
            text = f"{self._name}: {lost} of {self._records} lines of metrics were not logged there"
            fields = {"tracker": self._name, "lost": lost, "lines": self._records}
            self._notes.append(TrackerNote("tracker_lost", text, fields))

    def _flush(self) -> None:
        """Send what is queued, and wait until the helper process has ended or the time is over."""
        self._queue.append(_line({"end": True}))
        deadline, all_sent = self._clock() + self._flush_seconds, False
        while not self._has_ended and (left := deadline - self._clock()) > 0:
            self._pump()
            if not self._queue and not all_sent:
                all_sent = True
                with suppress(OSError):  # it has ended
                    self._socket.shutdown(socket.SHUT_WR)
            if not self._has_ended:
                select.select([self._socket], [self._socket] if self._queue else [], [], left)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _pump(self) -> None:
        """Send and receive what is possible without waiting."""
        with suppress(OSError):  # would wait, or it has ended: its last replies are read below
            while self._queue:
                self._offset += self._socket.send(memoryview(self._queue[0])[self._offset :])
                if self._offset == len(self._queue[0]):
                    self._queue.popleft()
                    self._offset = 0
        with suppress(BlockingIOError):
            while not self._has_ended:
                self._take(self._receive())

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_RECEIVED)
        except ConnectionError:
            return b""

    def _take(self, data: bytes) -> None:
        """Handle complete lines of the helper process; no data: it has ended."""
        *lines, self._received = (self._received + data).split(b"\n")
        for reply in map(json.loads, lines):
            if reply["kind"] == "failed":
                self._tell(reply["message"])
            elif reply["kind"] == "done":
                self._done += 1
            else:
                self._ended_in_order = True
        if not data:
            self._has_ended = True
            self._queue.clear()
            if not self._ended_in_order:
                self._tell(_ENDED)

    def _tell(self, why: str) -> None:
        """Report the first failure; the others would say the same."""
        if not self._has_told:
            self._has_told = True
            text = f"{self._name}: {why}; the run continues, and metrics.jsonl has all values"
            self._notes.append(TrackerNote("tracker_failed", text, {"tracker": self._name, "message": why}))


_ENDED = "its helper process has ended"
_WORKER = "hlat.tracking.hosted.worker"


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode("ascii") + b"\n"
