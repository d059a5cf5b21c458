"""Hashes of source files, remembered, so that a corpus is read again only where it may have changed.

A file is known by path, size, and time of modification or ETag. Beside finished data, ``hashes.json`` holds the files
that were touched, copied or moved since the manifest was written: their content was found to be the same.
"""

import json
from contextlib import suppress
from pathlib import Path

from hlat.data.manifest.manifest import DataManifest
from hlat.data.sources import SourceFile, Stamp
from hlat.data.stores import write_atomic

HASHES = "hashes.json"

KnownHashes = dict[Stamp, str]
"""What a file is known by -> sha256."""


def load_hashes(folder: Path, manifest: DataManifest | None = None) -> KnownHashes:
    """The hashes remembered in a folder, and those of the manifest; a damaged memory only costs hashing again."""
    try:
        stored = json.loads((folder / HASHES).read_bytes())
        remembered = {
            (str(path), int(size), int(mtime), str(etag)): str(sha256) for path, size, mtime, etag, sha256 in stored
        }
    except (OSError, ValueError, TypeError, RecursionError):
        remembered = {}
    records = [] if manifest is None else [part for source in manifest.sources for part in source.files]
    return {(record.path, record.bytes, record.mtime_ns, record.etag): record.sha256 for record in records} | remembered


def save_hashes(folder: Path, files: list[SourceFile]) -> None:
    """Write the hashes of these files, in place of what was remembered.

    Raises:
        OSError: the disk refused.
    """
    stored = [(*part.stamp, part.sha256) for file in files for part in file.files]
    write_atomic(folder / HASHES, json.dumps(stored).encode())


def update_hashes(folder: Path, files: list[SourceFile], known: KnownHashes) -> None:
    """Remember files of finished data if some were not known; a folder that cannot be written to stays as it is."""
    if any(part.stamp not in known for file in files for part in file.files):
        with suppress(OSError):
            save_hashes(folder, files)
