"""The protocol of a checkpoint format: everything that differs from one version of the format to the next.

    tensor chunks, metadata --CheckpointFormat--> files of a checkpoint     (the newest version writes)
    files of a checkpoint --CheckpointFormat--> index, metadata, tensors    (the version in its manifest reads)

All versions share two files, by which a version is found and every byte is verified: ``manifest.json``, a JSON object
whose ``format`` is the version, and ``COMMITTED``, the SHA-256 of the manifest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.filesystem import Disk, FileRecord
from hlat.checkpoint.format.index import StoredChunk, StoredTensor
from hlat.checkpoint.format.tensor_files import Region, TensorChunk, WriteResult

ReadFile = Callable[[str], bytes]
"""Returns the content of a small file of a checkpoint, by its path inside the checkpoint; the checkpoint may be remote.

Raises CheckpointError if the file is missing."""


class CheckpointFormat(ABC):
    """Writer and reader of one version of the checkpoint format."""

    # Number of the version: ``format`` in the manifest.
    version: int
    # Files that describe a checkpoint, as opposed to files of tensors. They are compared with their checksums
    # whenever a checkpoint is listed, and downloaded to show it. No other file may have their names.
    small_files: tuple[str, ...]

    @abstractmethod
    def write_chunks(self, disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
        """Write the chunks of a process into an existing folder and fsync the files, but not the folder itself.

        No two ranks write the same file. The folder is that of a checkpoint, or of a rank part of a snapshot. OSError
        if a file-system operation failed.
        """

    @abstractmethod
    def write_small_files(
        self, disk: Disk, folder: Path, chunks: Iterable[StoredChunk], meta: bytes
    ) -> dict[str, FileRecord]:
        """Write the small files and fsync them; return their records by name.

        Called on rank 0, after all ranks have written their chunks; those of a tensor cover it exactly once. ``meta``
        is JSON. OSError if a file-system operation failed.
        """

    @abstractmethod
    def manifest_fields(self, step: int, files: Mapping[str, FileRecord]) -> dict[str, Any]:
        """Return the fields of the manifest besides ``format``, as JSON values."""

    @abstractmethod
    def parse_manifest(self, manifest: Mapping[str, Any]) -> tuple[int, dict[str, FileRecord]]:
        """Parse a manifest of this version: its step, and its files by path inside the checkpoint.

        Raises:
            CheckpointError: a value is impossible, a path leaves the checkpoint, or a required file is not listed.
            ValueError: the manifest is invalid; KeyError, TypeError and AttributeError mean the same.
        """

    @abstractmethod
    def read_meta(self, read: ReadFile, step: int | None = None) -> dict[str, Any]:
        """Read the metadata: step, tokens, samples, recipe, versions, ...

        CheckpointError if it is missing or invalid, or not of ``step`` (None for any).
        """

    @abstractmethod
    def read_index(self, read: ReadFile, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
        """Read the index: every tensor by name, with its positions in the files.

        CheckpointError if it is missing, invalid, or contradicts ``file_bytes``, the sizes in the manifest.
        """

    @abstractmethod
    def read_regions(
        self, folder: Path, index: Mapping[str, StoredTensor], regions: Sequence[Region]
    ) -> list[torch.Tensor]:
        """Read regions of tensors to the CPU, in the saved dtype.

        CheckpointError if a file cannot be read, or contradicts the index.
        """
