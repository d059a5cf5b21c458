"""Markers of events that must happen only once in a run, however often it is restarted.

name --claim--> a marker file, durable before the event happens --> False for every later claim
"""

import os
from pathlib import Path

from hlat.runtime.errors import StorageError
from hlat.runtime.storage.fsync import sync_to_disk


class OnceMarkers:
    """Claimed names, stored as empty files of a folder.

    Args:
        folder: folder of the markers. It is created at the first claim; its parent must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claimed(self) -> set[str]:
        """Return the names that were claimed."""
        try:
            return {path.name for path in self._folder.iterdir()}
        except FileNotFoundError:
            return set()

    def claim(self, name: str) -> bool:
        """Claim a name; return True the first time, and False ever after, even if this process is killed next.

        Raises:
            StorageError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(exist_ok=True)
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            sync_to_disk(self._folder)
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written: {error.strerror}. Give another run.dir.") from error
        return True
