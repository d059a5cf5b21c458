"""What checkpoints are below a prefix of an object store, and whether they are whole. Nothing is changed.

Objects --list_remote_folders--> step -> names in its folder
Objects, step --read_remote_manifest--> marker, manifest --verify_remote--> every byte compared
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hlat.checkpoint.format import INDEX_NAME, META_NAME, FileRecord, check_meta, parse_index
from hlat.checkpoint.protocol import (
    MANIFEST_NAME,
    MARKER_NAME,
    STEP_FOLDER,
    CheckpointManifest,
    check_manifest,
    step_folder_name,
)
from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.runtime import CheckpointError
from hlat.runtime.distributed import sendable

BAD_MARKER_NAME = f"{MARKER_NAME}.bad"
"""What the marker of a damaged checkpoint is called in a store, which has no folders to rename."""

TRANSFERS = 4
"""Files that a process sends or receives at a time."""


@sendable
@dataclass(frozen=True)
class RemoteManifest:
    """A manifest of the store, and the bytes of it and of its marker."""

    marker: bytes
    text: bytes
    manifest: CheckpointManifest


def list_remote_folders(client: ObjectStoreClient) -> dict[int, set[str]]:
    """What is directly below the folder of each step, ascending by step.

    Raises:
        StorageError: the store does not answer, or refuses.
    """
    steps = sorted(int(match[1]) for entry in client.list_names() if (match := STEP_FOLDER.fullmatch(entry)))
    return {step: set(client.list_names(step_folder_name(step))) for step in steps}


def committed_steps(client: ObjectStoreClient) -> list[int]:
    """The steps that have a checkpoint there, ascending; raises what ``list_remote_folders`` does."""
    return [step for step, names in list_remote_folders(client).items() if MARKER_NAME in names]


def read_remote_manifest(client: ObjectStoreClient, step: int) -> RemoteManifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or the marker does not vouch for it.
        StorageError: the store does not answer, or refuses.
    """
    read = {name: _content(client, step, name) for name in (MARKER_NAME, MANIFEST_NAME)}
    manifest = check_manifest(read[MARKER_NAME], read[MANIFEST_NAME])
    if manifest.step != step:
        raise CheckpointError(f"its content is of step {manifest.step}")
    return RemoteManifest(read[MARKER_NAME], read[MANIFEST_NAME], manifest)


def verify_remote(client: ObjectStoreClient, step: int) -> list[str]:
    """Everything that is wrong with a checkpoint; every byte of it is read. Raises StorageError as above."""
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
    """Problems of the meta.json and the index of a checkpoint whose checksums match."""
    try:
        check_meta(_content(client, manifest.step, META_NAME), manifest.step)
        parse_index(_content(client, manifest.step, INDEX_NAME), manifest.file_bytes)
    except CheckpointError as error:
        return [str(error)]
    return []


def _content(client: ObjectStoreClient, step: int, name: str) -> bytes:
    content = client.read(f"{step_folder_name(step)}/{name}")
    if content is None:
        raise CheckpointError(f"{name} is missing")
    return content


def find_differences(manifest: CheckpointManifest, found: Mapping[str, FileRecord | None]) -> list[str]:
    """What of some files is not as a manifest says; None stands for one that is not there."""
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
