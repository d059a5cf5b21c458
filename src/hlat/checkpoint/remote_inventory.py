"""List the checkpoints below a prefix of an object store, as ``inventory.py`` does for a folder.

URL of a prefix, or of one checkpoint below it --RemotePrefix--> entries | problems of a step | tensors of a checkpoint

Only small files are read, except by ``problems``. Nothing is changed, neither in the store nor locally.
"""

import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hlat.checkpoint.inventory import CheckpointEntry, TensorGroup, group_tensors, open_unverified
from hlat.checkpoint.protocol.manifest import MANIFEST_NAME, MARKER_NAME, STEP_FOLDER, step_folder_name
from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.checkpoint.tiers.remote_reader import (
    BAD_MARKER_NAME,
    RemoteManifest,
    list_remote_folders,
    read_remote_manifest,
    verify_remote,
)
from hlat.runtime.errors import CheckpointError, CheckpointFormatError


class RemotePrefix:
    """The checkpoints below a URL, or the single checkpoint at a URL.

    The methods raise CheckpointError if the URL cannot be used or its backend is not installed.

    Args:
        url: ``checkpoint.remote`` of a run, or the URL of a checkpoint below it.
    """

    def __init__(self, url: str) -> None:
        parent, _, last = url.rstrip("/").rpartition("/")
        match = STEP_FOLDER.fullmatch(last)
        self._step = int(match[1]) if match else None
        self._client = ObjectStoreClient(parent if match else url)

    def entries(self) -> list[CheckpointEntry]:
        """List committed, damaged, set-aside and unfinished checkpoints, by step.

        Raises:
            StorageError: the store does not answer, or denies a request.
        """
        folders = list_remote_folders(self._client)
        steps = folders if self._step is None else {self._step} & folders.keys()
        return [self._read_entry(step, folders[step]) for step in sorted(steps)]

    def problems(self, step: int) -> list[str]:
        """List everything that is wrong with a checkpoint; every byte of it is read. Raises StorageError as above."""
        return verify_remote(self._client, step)

    def newest(self) -> tuple[str, Mapping[str, Any], list[TensorGroup]]:
        """Read the newest readable checkpoint: its URL, its metadata, and its tensors by kind.

        Raises:
            CheckpointError: there is none.
            StorageError: the store does not answer, or denies a request.
        """
        entries = [entry for entry in self.entries() if entry.state == "committed"]
        if not entries:
            raise CheckpointError(f"{self._client.url}: no readable checkpoint there.")
        step = entries[-1].step
        remote = read_remote_manifest(self._client, step)
        with TemporaryDirectory() as folder:
            local = Path(folder)
            (local / MARKER_NAME).write_bytes(remote.marker)
            (local / MANIFEST_NAME).write_bytes(remote.text)
            for name in remote.manifest.format.small_files:
                (local / name).write_bytes(self._read_small_file(step, name, remote))
            checkpoint = open_unverified(local)
            return self._client.url_of(step_folder_name(step)), checkpoint.meta, group_tensors(checkpoint)

    def _read_entry(self, step: int, names: Set[str]) -> CheckpointEntry:
        url = self._client.url_of(step_folder_name(step))
        if MARKER_NAME not in names:
            return CheckpointEntry(url, step, "set aside" if BAD_MARKER_NAME in names else "unfinished")
        try:
            remote = read_remote_manifest(self._client, step)
            meta = remote.manifest.format.read_meta(lambda name: self._read_small_file(step, name, remote))
        except CheckpointFormatError as error:
            return CheckpointEntry(url, step, "newer format", problem=str(error))
        except CheckpointError as error:
            return CheckpointEntry(url, step, "damaged", problem=str(error))
        return CheckpointEntry(
            url, step, "committed", sum(remote.manifest.file_bytes.values()), None, meta.get("tokens")
        )

    def _read_small_file(self, step: int, name: str, remote: RemoteManifest) -> bytes:
        content = self._client.read(f"{step_folder_name(step)}/{name}")
        if content is None:
            raise CheckpointError(f"{name} is missing")
        if hashlib.sha256(content).hexdigest() != remote.manifest.files[name].sha256:
            raise CheckpointError(f"{name} does not match its checksum")
        return content
