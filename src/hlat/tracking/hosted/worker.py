"""Helper process of a hosted tracker: receives records, drives the client, reports what went wrong.

    first line: HostedRun, client --> open --+
    lines: step, values -----------> log ----+--> the service, or files
    end of the stream -------------> close --+
    replies, one line each: done (a record that is at the service), failed (once per kind of call), ended

Steps up to the last one that was logged by an earlier attempt are left out: they are repeated with the same values.
"""

import fcntl
import importlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hlat.tracking.hosted.base import HostedClient, HostedRun

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NICENESS = 10  # training comes first
_LONGEST = 2000  # characters of an error


def main(descriptor: int) -> None:
    """Serve the connection with this descriptor until it ends."""
    for number in _IGNORED:  # those of a terminal or a scheduler are for the run, which then ends the connection
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    connection = socket.socket(fileno=descriptor)
    lines = _records(connection)
    start = next(lines, None)
    if start is None:
        return
    threading.Thread(target=_end_with_the_run, args=(descriptor, start["flush_seconds"]), daemon=True).start()
    run = HostedRun(start["name"], Path(start["run_dir"]), start["recipe"], start["settings"])
    _Service(start["tracker"], start["client"], run, connection).serve(lines)
    os._exit(0)  # libraries may have threads and exit handlers that wait


def _end_with_the_run(descriptor: int, seconds: float) -> None:
    """Kill this process group if it has not ended some seconds after the run's process has, however that ended."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always reported
    poll.poll()
    time.sleep(seconds)
    os.killpg(0, signal.SIGKILL)


def _records(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Iterate over the lines received until the connection ends; a half line of a killed process is left out."""
    with suppress(ConnectionError):
        for line in connection.makefile("rb"):
            if line.endswith(b"\n"):
                yield json.loads(line)


class _Service:
    def __init__(self, tracker: str, client: str, run: HostedRun, connection: socket.socket) -> None:
        self._client_name, self._run, self._connection = client, run, connection
        self._folder = run.run_dir / "trackers"
        self._file = self._folder / f"{tracker}.json"
        self._state: dict[str, Any] = {}
        self._failed_calls: set[str] = set()

    def serve(self, records: Iterator[dict[str, Any]]) -> None:
        try:
            with self._only_process():
                client, has_ended = self._open(), False
                for record in records:
                    if "end" in record:
                        has_ended = True
                    elif self._log(client, record["step"], record["values"]):
                        self._reply({"kind": "done"})
                self._call("close", lambda: client.close(failed=not has_ended))
        except Exception as error:
            self._report("open", error)
        self._reply({"kind": "ended"})

    @contextmanager
    def _only_process(self) -> Iterator[None]:
        """Wait until the process of an earlier attempt has sent what it had."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{self._file.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _open(self) -> HostedClient:
        with suppress(FileNotFoundError, ValueError):
            self._state = dict(json.loads(self._file.read_bytes()))
        module, _, name = self._client_name.partition(":")
        client: HostedClient = getattr(importlib.import_module(module), name)()
        self._state["id"] = client.open(self._run, self._state.get("id"))
        self._save()
        return client

    def _log(self, client: HostedClient, step: int, values: dict[str, float]) -> bool:
        """Log a record, unless that has been done; return True if the service has it."""
        if step <= self._state.get("step", 0):
            return True
        if not self._call("log", lambda: client.log(step, values)):
            return False
        self._state["step"] = step
        self._call("save", self._save)
        return True

    def _save(self) -> None:
        new = self._file.with_suffix(".tmp")
        new.write_text(json.dumps(self._state), encoding="utf-8")
        new.replace(self._file)

    def _call(self, name: str, action: Callable[[], None]) -> bool:
        """Call the client; report the first failure of each kind of call."""
        try:
            action()
        except Exception as error:
            if name not in self._failed_calls:
                self._failed_calls.add(name)
                self._report(name, error)
            return False
        return True

    def _report(self, call: str, error: Exception) -> None:
        self._reply({"kind": "failed", "message": f"{call}: {type(error).__name__}: {error}"[:_LONGEST]})

    def _reply(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the run has ended
            self._connection.sendall(json.dumps(message).encode() + b"\n")
