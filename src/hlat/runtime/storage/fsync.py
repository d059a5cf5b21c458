"""fsync of files and folders."""

import os
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or the entries of a folder, would survive a power failure.

    Raises:
        OSError: fsync failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
