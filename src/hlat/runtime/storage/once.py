"""Things that are to happen once in the life of a run, however often it is restarted.

name --claim--> a file, durable before the thing happens --> False for whoever asks again
"""

import os
from pathlib import Path

from hlat.runtime.errors import StorageError
from hlat.runtime.storage.fsync import sync_to_disk


class OnceMarkers:
    """What has happened already, as empty files of a folder.

    Args:
        folder: where; made when something happens first, in a folder that exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claimed(self) -> set[str]:
        """The names that were claimed."""
        try:
            return {path.name for path in self._folder.iterdir()}
        except FileNotFoundError:
            return set()

    def claim(self, name: str) -> bool:
        """Whether this is the first time; it never is again, whatever ends the process next.

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
