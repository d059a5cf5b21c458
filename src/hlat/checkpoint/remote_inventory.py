"""What lies below a prefix of an object store, for people: as ``inventory.py`` tells it of a folder.

URL of a prefix, or of one checkpoint below it --RemotePrefix--> entries | problems of a step | what a step holds

Only what is small is read, but by ``problems``. Nothing is changed, there or here.
"""

import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hlat.checkpoint.format import INDEX_NAME, META_NAME, parse_meta
from hlat.checkpoint.inventory import CheckpointEntry, TensorGroup, group_tensors, open_unverified
from hlat.checkpoint.protocol import MANIFEST_NAME, MARKER_NAME, STEP_FOLDER, step_folder_name
from hlat.checkpoint.tiers import (
    BAD_MARKER_NAME,
    ObjectStoreClient,
    RemoteManifest,
    list_remote_folders,
    read_remote_manifest,
    verify_remote,
)
from hlat.runtime import CheckpointError


class RemotePrefix:
    """The checkpoints below a URL, or the one that it names.

    Args:
        url: ``checkpoint.remote`` of a run, or the URL of a checkpoint below it.

    Raises:
        CheckpointError: the URL cannot be used, or its backend is not installed.
    """

    def __init__(self, url: str) -> None:
        parent, _, last = url.rstrip("/").rpartition("/")
        named = STEP_FOLDER.fullmatch(last)
        self._one = int(named[1]) if named else None
        self._client = ObjectStoreClient(parent if named else url)

    def entries(self) -> list[CheckpointEntry]:
        """Everything there that is a checkpoint, was one, or was to become one; by step.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        there = list_remote_folders(self._client)
        wanted = there if self._one is None else {self._one} & there.keys()
        return [self._entry(step, there[step]) for step in sorted(wanted)]

    def problems(self, step: int) -> list[str]:
        """Everything that is wrong with a checkpoint; every byte of it is read. Raises StorageError as above."""
        return verify_remote(self._client, step)

    def newest(self) -> tuple[str, Mapping[str, Any], list[TensorGroup]]:
        """The newest checkpoint that can be read: its URL, what it says of itself, and its tensors by kind.

        Raises:
            CheckpointError: there is none.
            StorageError: the store does not answer, or refuses.
        """
        entries = [entry for entry in self.entries() if entry.state == "committed"]
        if not entries:
            raise CheckpointError(f"{self._client.url}: no checkpoint there that can be read.")
        step = entries[-1].step
        vouched = read_remote_manifest(self._client, step)
        with TemporaryDirectory() as folder:
            head = Path(folder)
            (head / MARKER_NAME).write_bytes(vouched.marker)
            (head / MANIFEST_NAME).write_bytes(vouched.text)
            for name in (META_NAME, INDEX_NAME):
                (head / name).write_bytes(self._small(step, name, vouched))
            found = open_unverified(head)
            return self._client.url_of(step_folder_name(step)), found.meta, group_tensors(found)

    def _entry(self, step: int, names: Set[str]) -> CheckpointEntry:
        url = self._client.url_of(step_folder_name(step))
        if MARKER_NAME not in names:
            return CheckpointEntry(url, step, "set aside" if BAD_MARKER_NAME in names else "unfinished")
        try:
            vouched = read_remote_manifest(self._client, step)
            tokens = parse_meta(self._small(step, META_NAME, vouched)).get("tokens")
        except CheckpointError as error:
            return CheckpointEntry(url, step, "damaged", problem=str(error))
        return CheckpointEntry(url, step, "committed", sum(vouched.manifest.file_bytes.values()), None, tokens)

    def _small(self, step: int, name: str, vouched: RemoteManifest) -> bytes:
        content = self._client.read(f"{step_folder_name(step)}/{name}")
        if content is None:
            raise CheckpointError(f"{name} is missing")
        if hashlib.sha256(content).hexdigest() != vouched.manifest.files[name].sha256:
            raise CheckpointError(f"{name} does not match its checksum")
        return content
