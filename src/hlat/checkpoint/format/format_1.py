"""Version 1 of the checkpoint format: files of torch.distributed.checkpoint (DCP) with an index and JSON metadata.

manifest.json   {"format": 1, "step": 40, "files": {path: {"bytes": n, "sha256": hex}}}
meta.json       metadata (``meta.py``)
.metadata       index of tensors, a pickle in DCP's format that is never unpickled (``index.py``)
*.distcp        tensors, in the bytes of torch.save (``writer.py``)
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hlat.checkpoint.format.base import CheckpointFormat, ReadFile
from hlat.checkpoint.format.filesystem import Disk, FileRecord, write_file
from hlat.checkpoint.format.index import INDEX_NAME, StoredChunk, StoredTensor, parse_index, write_index
from hlat.checkpoint.format.meta import META_NAME, parse_meta
from hlat.checkpoint.format.partial_read import Region, read_regions
from hlat.checkpoint.format.tensor_chunks import TensorChunk
from hlat.checkpoint.format.writer import WriteResult, write_chunks
from hlat.runtime.errors import CheckpointError

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Format1(CheckpointFormat):
    """Version 1; see the head of this module."""

    version = 1
    small_files = (META_NAME, INDEX_NAME)

    def write_chunks(self, disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
        """Write the chunks as files of DCP."""
        return write_chunks(disk, folder, chunks, rank)

    def write_small_files(
        self, disk: Disk, folder: Path, chunks: Iterable[StoredChunk], meta: bytes
    ) -> dict[str, FileRecord]:
        """Write the index and the metadata."""
        return {INDEX_NAME: write_index(disk, folder, chunks), META_NAME: write_file(disk, folder / META_NAME, meta)}

    def manifest_fields(self, step: int, files: Mapping[str, FileRecord]) -> dict[str, Any]:
        """Return step and files."""
        return {"step": step, "files": {name: asdict(record) for name, record in sorted(files.items())}}

    def parse_manifest(self, manifest: Mapping[str, Any]) -> tuple[int, dict[str, FileRecord]]:
        """Check and return step and files."""
        files = {name: _record(name, entry) for name, entry in manifest["files"].items()}
        for required in (INDEX_NAME, META_NAME):
            if required not in files:
                raise CheckpointError(f"manifest.json does not list {required}")
        step = manifest["step"]
        if type(step) is not int or step < 0:
            raise CheckpointError(f"manifest.json has an impossible step {step!r}")
        return step, files

    def read_meta(self, read: ReadFile, step: int | None = None) -> dict[str, Any]:
        """Read ``meta.json``."""
        meta = parse_meta(read(META_NAME))
        if step is not None and (found := meta.get("step", step)) != step:
            raise CheckpointError(f"{META_NAME} is of step {found}, the manifest of step {step}")
        return meta

    def read_index(self, read: ReadFile, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
        """Read ``.metadata``."""
        try:
            return parse_index(read(INDEX_NAME), file_bytes)
        except CheckpointError as exc:
            raise CheckpointError(f"{INDEX_NAME}: {exc}") from exc

    def read_regions(
        self, folder: Path, index: Mapping[str, StoredTensor], regions: Sequence[Region]
    ) -> list[torch.Tensor]:
        """Read regions from the files of DCP."""
        return read_regions(folder, index, regions)


def _record(name: str, entry: Mapping[str, Any]) -> FileRecord:
    if not is_safe_name(name):
        raise CheckpointError(f"manifest.json lists {name!r}, which is not a plain path inside the checkpoint")
    size, digest = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise CheckpointError(f"manifest.json has an impossible size or checksum for {name}")
    return FileRecord(size, digest)


def is_safe_name(name: str) -> bool:
    """True if a name is a relative path that stays inside its folder on every platform."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and path.as_posix() == name and ".." not in path.parts and name not in ("", ".")
    return plain and not any(character in name for character in "\\:\0")
