"""Cache of the hashes of source files, so that only files that may have changed are read again.

A file is identified by path, size, and modification time or ETag. The manifest has the hashes of the files that the
data was made from. ``hashes.json`` next to it has those of files that were touched, copied or moved since.
"""

import json
from contextlib import suppress
from pathlib import Path

from hlat.data.manifest.manifest import DataManifest
from hlat.data.sources.source_file import SourceFile, Stamp
from hlat.data.stores.atomic_files import write_atomic

HASHES = "hashes.json"

KnownHashes = dict[Stamp, str]
"""The sha256 of files by their identity."""


def load_hashes(folder: Path, manifest: DataManifest | None = None) -> KnownHashes:
    """Load the hashes of a folder and its manifest; if ``hashes.json`` is damaged, its files are hashed again."""
    try:
        stored = json.loads((folder / HASHES).read_bytes())
        saved = {
            (str(path), int(size), int(mtime), str(etag)): str(sha256) for path, size, mtime, etag, sha256 in stored
        }
    except (OSError, ValueError, TypeError, RecursionError):
        saved = {}
    records = [] if manifest is None else [file for source in manifest.sources for file in source.files]
    return {(record.path, record.bytes, record.mtime_ns, record.etag): record.sha256 for record in records} | saved


def save_hashes(folder: Path, files: list[SourceFile]) -> None:
    """Write the hashes of these files to ``hashes.json``, replacing its content.

    Raises:
        OSError: the disk refused the write.
    """
    stored = [(*file.stamp, file.sha256) for source in files for file in source.files]
    write_atomic(folder / HASHES, json.dumps(stored).encode())


def update_hashes(folder: Path, files: list[SourceFile], known: KnownHashes) -> None:
    """Save the hashes of the files if some are not in ``known``; do nothing if the folder cannot be written to."""
    if any(file.stamp not in known for source in files for file in source.files):
        with suppress(OSError):
            save_hashes(folder, files)
