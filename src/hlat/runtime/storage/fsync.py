"""Waiting until something is on the disk."""

import os
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, would survive a power cut.

    Raises:
        OSError: the disk refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
