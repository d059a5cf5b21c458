"""Follow a JSON lines file that a run appends to, without reading its old lines again."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_REMEMBERED = 1 << 12  # last bytes read, by which a copy of the file is recognized


class JsonTail:
    """Reader of the new lines of a file, which may not exist yet, or be replaced by another one.

    Of a copy of the file, with which a run replaces one that was removed, only the lines that are new are read.

    Args:
        path: the file.
        most: bytes before its end to begin with; None for the complete file.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path, self._most = path, most
        self._inode, self._offset, self._last = -1, 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Return the complete records since the last call; damaged lines and errors of the disk are skipped."""
        with suppress(OSError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                file.seek(max(0, self._offset - len(self._last)))
                if not self._last or file.read(len(self._last)) != self._last:
                    self._offset = 0 if self._most is None else max(0, found.st_size - self._most)
                self._inode = found.st_ino
            file.seek(self._offset)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._offset += end
            self._last = data[max(0, end - _REMEMBERED) : end] or self._last
            return [record for line in data[:end].splitlines() if (record := _decode(line)) is not None]
        return []


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
