"""A text stream whose lines are log records, for a console that is not a terminal.

console of a run --write--> LogStream --lines--> logging, logger "hlat", level INFO
"""

import io
import logging
from typing import Any


class LogStream(io.TextIOBase):
    """Stream that logs each line that is written to it.

    Args:
        logger: receives the lines.
        level: their level.
    """

    encoding = "utf-8"

    def __init__(self, logger: logging.Logger, level: int = logging.INFO) -> None:
        self._logger, self._level = logger, level
        self._rest = ""

    def write(self, text: str) -> int:
        """Log the complete lines; keep an incomplete one until it ends. Return the length of the text."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.log(self._level, "%s", line)
        return len(text)

    def close(self) -> None:
        """Log an incomplete last line."""
        if not self.closed and self._rest:
            self.write("\n")
        super().close()

    def writable(self) -> bool:
        """Return True."""
        return True

    def __enter__(self) -> "LogStream":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
