"""What checkpoints are below a prefix of an object store, and whether they are whole. Nothing is changed.

Objects --remote_folders--> step -> names in its folder
Objects, step --remote_manifest--> marker, manifest --remote_problems--> every byte compared
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hlat.checkpoint.format import INDEX_NAME, META_NAME, FileRecord, check_meta, parse_index
from hlat.checkpoint.protocol import MANIFEST_NAME, MARKER_NAME, STEP_NAME, Manifest, check_manifest, step_name
from hlat.checkpoint.tiers.object_store import Objects
from hlat.runtime import CheckpointError
from hlat.runtime.distributed import sendable

SET_ASIDE = f"{MARKER_NAME}.bad"
"""What the marker of a damaged checkpoint is called in a store, which has no folders to rename."""

TRANSFERS = 4
"""Files that a process sends or receives at a time."""


@sendable
@dataclass(frozen=True)
class Vouched:
    """A manifest of the store, and the bytes of it and of its marker."""

    marker: bytes
    text: bytes
    manifest: Manifest


def remote_folders(objects: Objects) -> dict[int, set[str]]:
    """What is directly below the folder of each step, ascending by step.

    Raises:
        StorageError: the store does not answer, or refuses.
    """
    steps = sorted(int(match[1]) for entry in objects.entries() if (match := STEP_NAME.fullmatch(entry)))
    return {step: set(objects.entries(step_name(step))) for step in steps}


def committed_steps(objects: Objects) -> list[int]:
    """The steps that have a checkpoint there, ascending; raises what ``remote_folders`` does."""
    return [step for step, names in remote_folders(objects).items() if MARKER_NAME in names]


def remote_manifest(objects: Objects, step: int) -> Vouched:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or the marker does not vouch for it.
        StorageError: the store does not answer, or refuses.
    """
    read = {name: _content(objects, step, name) for name in (MARKER_NAME, MANIFEST_NAME)}
    manifest = check_manifest(read[MARKER_NAME], read[MANIFEST_NAME])
    if manifest.step != step:
        raise CheckpointError(f"its content is of step {manifest.step}")
    return Vouched(read[MARKER_NAME], read[MANIFEST_NAME], manifest)


def remote_problems(objects: Objects, step: int) -> list[str]:
    """Everything that is wrong with a checkpoint; every byte of it is read. Raises StorageError as above."""
    try:
        manifest = remote_manifest(objects, step).manifest
    except CheckpointError as error:
        return [str(error)]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        names = list(manifest.files)
        found = pool.map(lambda name: objects.digest(f"{step_name(step)}/{name}"), names)
        problems = differences(manifest, dict(zip(names, found, strict=True)))
    return problems or _problems_inside(objects, manifest)


def _problems_inside(objects: Objects, manifest: Manifest) -> list[str]:
    """Problems of the meta.json and the index of a checkpoint whose checksums match."""
    try:
        check_meta(_content(objects, manifest.step, META_NAME), manifest.step)
        parse_index(_content(objects, manifest.step, INDEX_NAME), manifest.file_bytes)
    except CheckpointError as error:
        return [str(error)]
    return []


def _content(objects: Objects, step: int, name: str) -> bytes:
    content = objects.read(f"{step_name(step)}/{name}")
    if content is None:
        raise CheckpointError(f"{name} is missing")
    return content


def differences(manifest: Manifest, found: Mapping[str, FileRecord | None]) -> list[str]:
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
