"""List and verify the checkpoints below a prefix of an object store. Nothing is changed.

client --list_remote_folders--> step -> names in its folder
client, step --read_remote_manifest--> marker, manifest --verify_remote--> every byte compared
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hlat.checkpoint.format.filesystem import FileRecord
from hlat.checkpoint.protocol.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    STEP_FOLDER,
    CheckpointManifest,
    check_manifest,
    step_folder_name,
)
from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, CheckpointFormatError

BAD_MARKER_NAME = f"{MARKER_NAME}.bad"
"""Name that the marker of a damaged checkpoint gets; folders of an object store cannot be renamed."""

TRANSFERS = 4
"""Number of files that a process uploads or downloads concurrently."""


@sendable
@dataclass(frozen=True)
class RemoteManifest:
    """Manifest of a checkpoint in the store, with the original bytes of the manifest and of its marker."""

    marker: bytes
    text: bytes
    manifest: CheckpointManifest


def list_remote_folders(client: ObjectStoreClient) -> dict[int, set[str]]:
    """List the names directly below the folder of each step, by step in ascending order.

    Raises:
        StorageError: the store does not answer, or denies the request.
    """
    steps = sorted(int(match[1]) for entry in client.list_names() if (match := STEP_FOLDER.fullmatch(entry)))
    return {step: set(client.list_names(step_folder_name(step))) for step in steps}


def committed_steps(client: ObjectStoreClient) -> list[int]:
    """Steps with a committed checkpoint in the store, ascending. Raises StorageError as ``list_remote_folders``."""
    return [step for step, names in list_remote_folders(client).items() if MARKER_NAME in names]


def read_remote_manifest(client: ObjectStoreClient, step: int) -> RemoteManifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, invalid, of another step, or does not match the marker.
        CheckpointFormatError: a newer version of hlat wrote it.
        StorageError: the store does not answer, or denies the request.
    """
    read = {name: _content(client, step, name) for name in (MARKER_NAME, MANIFEST_NAME)}
    try:
        manifest = check_manifest(read[MARKER_NAME], read[MANIFEST_NAME])
    except CheckpointFormatError as error:
        raise CheckpointFormatError(f"{client.url_of(step_folder_name(step))}: {error}") from error
    if manifest.step != step:
        raise CheckpointError(f"its content is of step {manifest.step}")
    return RemoteManifest(read[MARKER_NAME], read[MANIFEST_NAME], manifest)


def verify_remote(client: ObjectStoreClient, step: int) -> list[str]:
    """List everything that is wrong with a checkpoint; every byte of it is read. Raises StorageError as above."""
    try:
        manifest = read_remote_manifest(client, step).manifest
    except CheckpointError as error:
        return [str(error)]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        names = list(manifest.files)
        found = pool.map(lambda name: client.hash_object(f"{step_folder_name(step)}/{name}"), names)
        problems = find_differences(manifest, dict(zip(names, found, strict=True)))
    return problems or _problems_inside(client, manifest)


def _problems_inside(client: ObjectStoreClient, manifest: CheckpointManifest) -> list[str]:
    """List problems of meta.json and the index, for a checkpoint whose checksums match."""
    return manifest.content_problems(lambda name: _content(client, manifest.step, name))


def _content(client: ObjectStoreClient, step: int, name: str) -> bytes:
    content = client.read(f"{step_folder_name(step)}/{name}")
    if content is None:
        raise CheckpointError(f"{name} is missing")
    return content


def find_differences(manifest: CheckpointManifest, found: Mapping[str, FileRecord | None]) -> list[str]:
    """List the files that differ from a manifest; a record of None stands for a missing file."""
    problems = []
    for name, record in found.items():
        expected = manifest.files[name]
        if record is None:
            problems.append(f"{name} is missing")
        elif record.bytes != expected.bytes:
            problems.append(f"{name} has {record.bytes} bytes, the manifest says {expected.bytes}")
        elif record != expected:
            problems.append(f"{name} does not match its checksum")
    return problems
