"""Table of all hosts: their newest statuses, and how long each has been silent, by the clock of the reader.

host-00000.json, host-00001.json, ... --read again and again--> HostTable --> silence of a host in seconds
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.hosts.records import HostStatus, host_file, parse_status


@dataclass(frozen=True)
class SeenStatus:
    """A status, and when it was seen.

    Attributes:
        status: the status.
        at: time when it was seen first, on the clock of the table.
        alive: True if the supervisor of this start of the host has written one before: files of earlier launches lie
            in the same folder.
    """

    status: HostStatus
    at: float
    alive: bool


class HostTable:
    """Statuses of all hosts.

    Args:
        folder: folder of the files.
        clock: monotonic clock, seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._seen: dict[int, SeenStatus] = {}
        self._texts: dict[Path, bytes] = {}

    def refresh(self, indices: Collection[int] | None = None) -> None:
        """Read statuses again.

        Files are read, not only looked at: file servers let clients see a change when they open a file, and its time
        of change much later.

        Args:
            indices: hosts to look at; None for all. Each host that looked at all would be too much for many of them.
        """
        now = self._clock()
        files = self._folder.glob("host-*.json") if indices is None else [host_file(self._folder, i) for i in indices]
        for path in sorted(files):
            status = self._read_if_changed(path)
            if status is None:
                continue
            before = self._seen.get(status.index)
            if before is None or before.status.incarnation != status.incarnation:
                # The first status of a start of the host may have been left behind by an earlier launch. It counts as
                # alive only if another incarnation was there before, which it has replaced.
                self._seen[status.index] = SeenStatus(status, now, alive=before is not None)
            elif before.status.count != status.count:
                self._seen[status.index] = SeenStatus(status, now, alive=True)

    def _read_if_changed(self, path: Path) -> HostStatus | None:
        try:
            text = path.read_bytes()
        except OSError:
            return None
        if text == self._texts.get(path):
            return None
        self._texts[path] = text
        return parse_status(text)

    def seen(self, index: int) -> SeenStatus | None:
        """Return the last status of a host; None if it has none."""
        return self._seen.get(index)

    def silence(self, index: int) -> float:
        """Seconds since a host has written a new status; infinite if it never has, as far as is known here."""
        found = self._seen.get(index)
        return self._clock() - found.at if found is not None and found.alive else float("inf")

    def living(self, seconds: float) -> dict[int, HostStatus]:
        """Return the hosts that were silent for at most ``seconds``, by index."""
        return {
            index: found.status
            for index, found in sorted(self._seen.items())
            if found.alive and self._clock() - found.at <= seconds
        }
