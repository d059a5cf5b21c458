"""events.jsonl: what happened to a run, in order of time, never cut back.

    start, resume (with what changed in the recipe), checkpoint saved, pruned or bad, anomaly, rollback, corruption,
    error, end

Metrics tell what the run as a whole computed; events tell its history, the steps that were done twice included.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hlat.runtime import redact_json
from hlat.tracking.jsonl import JsonLines, read_records


class EventLog:
    """Appends events to a file. Each survives a power cut when ``append`` returns: events are rare.

    Args:
        path: the file; created if it does not exist, in a folder that does.
        clock: seconds since 1970, UTC.

    Raises:
        StorageError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = JsonLines(path)

    def append(self, kind: str, /, **fields: Any) -> None:
        """Record that ``kind`` happened now. Fields must be what JSON can express.

        URLs are recorded without what they may open, which a checkpoint of an earlier version or a library's error may
        hold.
        """
        assert not fields.keys() & {"time", "event"}, "time and event are set here"
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._file.append({"time": now, "event": kind, **redact_json(fields)})
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event, oldest first. A half-written last line is ignored.

    Raises:
        DataError: another line is not a JSON object; the message names it.
        StorageError: the file cannot be read.
    """
    return read_records(path)
