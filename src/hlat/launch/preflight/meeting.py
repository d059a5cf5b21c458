"""The meeting of the hosts: they exchange reports as files in a folder of the run.

    <run.dir>/doctor/host-00001.json    ``HostStatus`` of host 1, written twice a second: while its count grows, as
                                        seen on the clock of the host that looks, host 1 is alive (``HostTable``)
                     0f3a.../           folder of the meeting of this start of host 0
                       77b2...-ranks.json     report of this start of a host for the stage "ranks"

Files of another meeting do not disturb: those of an earlier one count no more, and one that begins while another ends
has a folder of its own.
"""

import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.launch.hosts.records import HostStatus, HostTable, host_file, parse_record, write_record
from hlat.launch.preflight.request import PreflightRequest
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.version import VERSION

_POLL = 0.05  # seconds between looks, at first
_LONGEST_POLL = 0.5
_BEAT = 0.5  # seconds between statuses
_SILENCE = 15.0  # seconds without a new status until a host is lost
_LEAVING = 5.0  # seconds for the other hosts to read the verdict

Report = dict[str, Any]


# Not the agents and the leader of a training run: a host that the leader does not reach has no part in an attempt, and
# one that sees no leader leads alone. Here both take part, and are the finding.
class Meeting:
    """The meeting of the hosts of a request in a folder that they share.

    OSError: the folder cannot be written. TimeoutError: host 0 did not come in time.
    """

    def __init__(self, root: Path, request: PreflightRequest) -> None:
        self._root, self._node, self._patience = root, request.node, request.options.patience
        incarnation = secrets.token_hex(8)
        self._own = HostStatus(request.node, incarnation, 0, request.name, "", 0, request.nproc, VERSION)
        self._table, self._stop = HostTable(root), threading.Event()
        root.mkdir(parents=True, exist_ok=True)
        if request.node == 0:
            (root / incarnation).mkdir(mode=0o700)
        self._beat()
        self._beating = threading.Thread(target=self._keep_beating, name="alive", daemon=True)
        self._beating.start()
        self._first = incarnation if request.node == 0 else self._await_first()
        self.folder = root / self._first  # of this meeting only

    def post(self, stage: str, report: Report) -> None:
        """Publish the report of this host."""
        write_atomic(self._file(stage, self._own), json.dumps(report).encode())

    def gather(self, stage: str, nodes: Iterable[int], seconds: float | None = None) -> dict[int, Report]:
        """Wait for the reports of hosts; return those that came. A host without one gave no sign of life.

        ``seconds``: to wait for a host to come, and for the report of one that is alive; None for the user's patience.
        """
        found: dict[int, Report] = {}
        deadline, pause = time.monotonic() + (self._patience if seconds is None else seconds), _POLL
        waiting = set(nodes)
        while True:
            self._table.refresh(waiting - {self._node})
            found |= {node: report for node in sorted(waiting) if (report := self._read(stage, node)) is not None}
            # A host that has not come yet may still come; one that has, and is silent, is lost.
            waiting = {node for node in waiting - found.keys() if not self._is_lost(node)}
            if not waiting or time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL)

    def read_first(self, stage: str) -> Report:
        """Wait for the report of host 0, which waits for every other host in turn; TimeoutError if it is lost."""
        if not (found := self.gather(stage, [0], math.inf)):
            raise TimeoutError("no sign of life from host 0")
        return found[0]

    def leave(self) -> None:
        """End the meeting; host 0 waits until the others have read the verdict, and removes all files."""
        self._stop.set()
        self._beating.join()
        own = host_file(self._root, self._node)
        if self._node == 0:
            self._table.refresh()
            deadline, others = time.monotonic() + _LEAVING, self._table.living(math.inf).keys() - {0}
            while time.monotonic() < deadline and any(host_file(self._root, node).exists() for node in others):
                time.sleep(_POLL)
            # The next meeting may have begun, which its host 0 has written there. Else the rest is of killed ones.
            is_last = self._writer(own) == self._first
            shutil.rmtree(self._root if is_last else self._root / self._first, ignore_errors=True)
        with suppress(OSError):
            if self._node != 0:
                own.unlink(missing_ok=True)
            self._root.rmdir()  # unless another host or meeting has files there

    def _await_first(self) -> str:
        """Wait for a sign of life of host 0; return its start."""
        deadline = time.monotonic() + self._patience
        while self._table.silence(0) == math.inf:
            if time.monotonic() > deadline:
                self.leave()
                raise TimeoutError(f"no sign of life from host 0 in {self._root}")
            time.sleep(_POLL)
            self._table.refresh([0])
        return self._table.living(math.inf)[0].incarnation

    def _is_lost(self, node: int) -> bool:
        """Return True if a host has been alive, and is silent; for host 0 also if it has been started anew."""
        seen = self._table.seen.get(node)
        if node == 0 and seen is not None and seen.status.incarnation != self._first:
            return True
        return _SILENCE < self._table.silence(node) < math.inf

    @staticmethod
    def _writer(file: Path) -> str | None:
        with suppress(OSError):
            status = parse_record(HostStatus, file.read_bytes())
            return None if status is None else status.incarnation
        return None

    def _beat(self) -> None:
        self._own = replace(self._own, count=self._own.count + 1)
        write_record(host_file(self._root, self._node), self._own)

    def _keep_beating(self) -> None:
        while not self._stop.wait(_BEAT):
            with suppress(OSError):
                self._root.mkdir(exist_ok=True)  # the end of an earlier meeting may have removed it
                self._beat()

    def _read(self, stage: str, node: int) -> Report | None:
        """Read a report of a host that has been seen alive."""
        seen = self._table.seen.get(node)
        status = self._own if node == self._node else seen.status if seen is not None and seen.alive else None
        if status is None:
            return None
        with suppress(OSError, ValueError):
            content: Report = json.loads(self._file(stage, status).read_bytes())
            return content
        return None

    def _file(self, stage: str, status: HostStatus) -> Path:
        return self.folder / f"{status.incarnation}-{stage}.json"


def remove_if_empty(folder: Path, kept: Path) -> None:
    """Remove a folder and its parents up to ``kept``, as long as they are empty."""
    while folder != kept and kept in folder.parents:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def existing_part(folder: Path) -> Path:
    """Return a path or its nearest parent that is there; a broken link is there."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder
