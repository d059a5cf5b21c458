"""events.jsonl: the history of a run, in order of time, never truncated.

    start, resume (with the changes of the recipe), checkpoint, checkpoint_failed, anomaly, rollback, corruption, error,
    end, ...

Metrics have one line per logged step. Events have everything that happened, including steps that were repeated.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hlat.runtime.urls import redact_json
from hlat.tracking.jsonl import JsonLines, read_records


class EventLog:
    """Append-only file of events. Each one is synced to disk when ``append`` returns; events are rare.

    Args:
        path: the file; created if it does not exist. Its folder must exist.
        clock: seconds since 1970, UTC.

    Raises:
        StorageError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = JsonLines(path)

    def append(self, kind: str, /, **fields: Any) -> None:
        """Record that an event of this kind happened now. Fields must be JSON values.

        Credentials in URLs are removed; a checkpoint of an earlier version or a library's error may contain them.
        """
        assert not fields.keys() & {"time", "event"}, "time and event are set here"
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._file.append({"time": now, "event": kind, **redact_json(fields)})
        self._file.sync()

    def last_move(self) -> str:
        """Return what was done if the file was renamed, removed or replaced since the last call."""
        return self._file.last_move()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return every event, oldest first. A half-written last line is ignored.

    Raises:
        DataError: another line is not a JSON object; the message names it.
        StorageError: the file cannot be read.
    """
    return read_records(path)
