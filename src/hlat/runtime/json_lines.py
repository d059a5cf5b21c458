"""Log lines as JSON objects, and the helper process that makes every line of two streams such an object.

    pipe of standard output --+--> lines of hlat: unchanged                          --> standard output
    pipe of standard error  --+--> other lines: event "output" with the line as text --> standard error

The helper runs this file as a script, so it imports nothing of hlat and stays small. It ends when all writers have.
"""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

FIELDS = ("time", "level", "event", "rank", "step", "message", "values")  # keys of every line, in this order

_STREAMS = {"stdout": "info", "stderr": "warning"}  # level of lines that are not hlat's
_LONGEST = 1 << 20  # bytes; a longer line without an end is cut
_READ = 1 << 16  # bytes: a pipe's usual capacity on Linux


def format_line(
    event: str,
    message: str,
    *,
    level: str = "info",
    rank: int | None = None,
    step: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> str:
    """Return a log line in ASCII, without its newline; ``level`` is info, warning or error; JSON values."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    found = (now, level, event, rank, step, message, dict(values or {}))
    return json.dumps(dict(zip(FIELDS, found, strict=True)), allow_nan=False)


def convert(line: bytes, stream: str) -> bytes:
    """Return a printed line as a JSON line: unchanged if it is one of hlat's; nothing for a blank line."""
    if not line.strip():
        return b""
    if _is_log_line(line):
        return line + b"\n"
    text = line.decode("utf-8", "backslashreplace")
    return format_line("output", text, level=_STREAMS[stream], values={"stream": stream}).encode() + b"\n"


def _is_log_line(line: bytes) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and tuple(record) == FIELDS


def _copy(source: int, target: int, stream: str) -> None:
    # Until the last writer has closed the pipe.
    rest, lines_out = b"", _Lines(target)
    while data := os.read(source, _READ):
        *lines, rest = re.split(rb"[\r\n]+", rest + data)  # \r: a line that a program draws again
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        for line in filter(None, (convert(each, stream) for each in lines)):
            lines_out.write(line)
    lines_out.write(convert(rest, stream))


class _Lines:
    """Lines of a descriptor; those that it refuses are counted, and told before the next one."""

    def __init__(self, target: int) -> None:
        self._target, self._lost, self._within_line = target, 0, False
        self._why = ""

    def write(self, line: bytes) -> None:
        if self._lost:
            # The reader takes lines again: it hears of the gap first.
            text, values = f"{self._lost} lines of output lost: {self._why}", {"lines": self._lost}
            notice = format_line("output_lost", text, level="warning", values=values)
            line = b"\n" * self._within_line + notice.encode() + b"\n" + line
        rest = line
        try:
            while rest:
                rest = rest[os.write(self._target, rest) :]
                self._within_line = bool(rest)
            self._lost = 0
        except OSError as error:
            self._lost, self._why = self._lost + 1, str(error.strerror)


def main(sources: list[int]) -> None:
    """Copy the lines of two pipes to the streams of this process, until both have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # the run's last lines follow them
        signal.signal(number, signal.SIG_IGN)
    threads = [
        threading.Thread(target=_copy, args=(source, target, stream))
        for source, (target, stream) in zip(sources, enumerate(_STREAMS, 1), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
