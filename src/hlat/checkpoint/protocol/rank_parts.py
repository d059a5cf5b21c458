"""Rank parts: a snapshot consists of one folder per rank, with the state stored on that rank and its own manifest.

    chunks of a rank --write_part--> rank-00003/  model__3_0.distcp ...   as in a checkpoint
                                                  part.json               position of each chunk, sizes, sha256
                                                  COMMITTED               sha256 of part.json, the last file written
    folder --read_part--> RankPart --verify_part--> every byte compared

Like a checkpoint, the folder appears by an atomic rename. Parts belong to the same snapshot if they have the same
token. Each snapshot draws a new random token, so parts of two attempts at the same step are never combined.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.filesystem import Disk, FileRecord, copy_file, make_folders, write_file
from hlat.checkpoint.format.format_1 import is_safe_name
from hlat.checkpoint.format.index import StoredChunk
from hlat.checkpoint.format.tensor_chunks import TensorChunk
from hlat.checkpoint.format.versions import newest_format
from hlat.checkpoint.protocol.manifest import MARKER_NAME, STAGING_PREFIX, hash_file
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError

PART_NAME = "part.json"


@sendable
@dataclass(frozen=True)
class RankPart:
    """Manifest of a rank part, ``part.json``.

    Attributes:
        token: random token of the snapshot.
        step: optimizer steps done.
        rank: rank that wrote the part.
        world: number of parts, which is the world size.
        files: path inside the folder -> size and hash.
        chunks: position of each tensor chunk in the files.
        meta: metadata of the checkpoint, in rank 0's part; None in the others.
    """

    token: str
    step: int
    rank: int
    world: int
    files: Mapping[str, FileRecord]
    chunks: Sequence[StoredChunk]
    meta: Mapping[str, Any] | None

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(record.bytes for record in self.files.values())


def part_folder_name(rank: int) -> str:
    """Folder name of a rank part: 3 -> 'rank-00003'."""
    return f"rank-{rank:05d}"


def write_part(
    disk: Disk, final: Path, part: RankPart, chunks: Sequence[TensorChunk], copied: Mapping[str, Path]
) -> tuple[RankPart, bytes]:
    """Write a rank part and fsync it.

    Args:
        disk: file-system operations.
        final: folder of the part.
        part: the part without files and chunks.
        chunks: tensor chunks to be written.
        copied: path inside the folder -> file to copy there.

    Returns:
        The part with its files and chunks, and the content of ``part.json``.

    Raises:
        OSError: a file-system operation failed. The caller must remove what was written so far.
    """
    staging = final.with_name(STAGING_PREFIX + final.name)
    disk.remove_tree(staging)
    make_folders(disk, staging, inside=final.parent.parent)  # the run's snapshot folder on this machine
    written = newest_format().write_chunks(disk, staging, chunks, part.rank)
    records = dict(written.files)
    for name, source in copied.items():
        make_folders(disk, (staging / name).parent, inside=staging)
        records[name] = copy_file(disk, source, staging / name)
    complete = RankPart(part.token, part.step, part.rank, part.world, records, written.chunks, part.meta)
    text = _text(complete)
    finish_part(disk, staging, final, text)
    return complete, text


def finish_part(disk: Disk, staging: Path, final: Path, text: bytes) -> None:
    """Write ``part.json`` and the marker of a part, fsync, and rename the folder to its final name.

    Raises:
        OSError: a file-system operation failed.
    """
    record = write_file(disk, staging / PART_NAME, text)
    write_file(disk, staging / MARKER_NAME, record.sha256.encode())
    for folder in sorted(path for path in staging.rglob("*") if path.is_dir()):
        disk.sync_folder(folder)
    disk.sync_folder(staging)
    disk.rename(staging, final)
    for folder in (final.parent, final.parent.parent):
        disk.sync_folder(folder)


def read_part(folder: Path) -> RankPart:
    """Read the manifest of a part; its other files are not read.

    Raises:
        CheckpointError: the folder is not a rank part, or its manifest is damaged.
    """
    try:
        marker, text = (folder / MARKER_NAME).read_bytes(), (folder / PART_NAME).read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{Path(exc.filename).name} cannot be read ({exc.strerror})") from exc
    if marker != hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{PART_NAME} does not match the checksum in {MARKER_NAME}")
    return parse_part(text)


def parse_part(text: bytes) -> RankPart:
    """Parse the content of a ``part.json``.

    Raises:
        CheckpointError: it is invalid.
    """
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(
            f"{PART_NAME} is not the manifest of a snapshot part ({type(exc).__name__}: {exc})"
        ) from exc


def verify_part(folder: Path, part: RankPart) -> list[str]:
    """List the files of a part that are damaged or missing; every byte is read."""
    return [problem for name, record in part.files.items() if (problem := _file_problem(folder, name, record))]


def _file_problem(folder: Path, name: str, record: FileRecord) -> str:
    path = folder / name
    try:
        if (size := path.stat().st_size) != record.bytes:
            return f"{name} has {size} bytes, {PART_NAME} says {record.bytes}"
        return "" if hash_file(path) == record.sha256 else f"{name} does not match its checksum"
    except OSError as exc:
        return f"{name} cannot be read ({exc.strerror})"


@dataclass(frozen=True)
class PartCopy:
    """A rank part to be copied into a checkpoint; the hashes of its files are compared."""

    folder: Path
    part: RankPart

    def write(self, disk: Disk, target: Path) -> dict[str, FileRecord]:
        """Copy the files into the staging folder of a checkpoint.

        Returns:
            Size and hash of each file.

        Raises:
            OSError: a file-system operation failed.
            CheckpointError: a file does not match its hash.
        """
        for name, record in sorted(self.part.files.items()):
            make_folders(disk, (target / name).parent, inside=target)
            if copy_file(disk, self.folder / name, target / name) != record:
                raise CheckpointError(f"{self.folder / name}: does not match its checksum")
        for folder in sorted({(target / name).parent for name in self.part.files} - {target}):
            disk.sync_folder(folder)
        return dict(self.part.files)


def _text(part: RankPart) -> bytes:
    chunks = [{**asdict(chunk), "dtype": str(chunk.dtype).removeprefix("torch.")} for chunk in part.chunks]
    plain = {
        "format": newest_format().version,
        "token": part.token,
        "step": part.step,
        "rank": part.rank,
        "world": part.world,
    }
    files = {name: asdict(record) for name, record in sorted(part.files.items())}
    return json.dumps({**plain, "files": files, "blocks": chunks, "meta": part.meta}, allow_nan=False).encode()


def _parse(text: Any) -> RankPart:
    if text["format"] != newest_format().version:  # its tensor files become those of a checkpoint
        raise ValueError(f"format {text['format']!r} is unknown to this version")
    numbers: dict[str, int] = {name: _count(text[name]) for name in ("step", "rank", "world")}
    files = {_name(name): FileRecord(_count(it["bytes"]), str(it["sha256"])) for name, it in text["files"].items()}
    chunks = [_chunk(entry) for entry in text["blocks"]]
    if any(chunk.file not in files for chunk in chunks):
        raise ValueError("a chunk lies in a file that the part does not have")
    if text["meta"] is not None and not isinstance(text["meta"], dict):
        raise ValueError("meta is not an object")
    return RankPart(str(text["token"]), **numbers, files=files, chunks=chunks, meta=text["meta"])


def _chunk(entry: Any) -> StoredChunk:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    shape, offsets, sizes = (tuple(map(_count, entry[name])) for name in ("shape", "offsets", "sizes"))
    begin, length = _count(entry["begin"]), _count(entry["length"])
    return StoredChunk(str(entry["name"]), dtype, shape, offsets, sizes, _name(entry["file"]), begin, length)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return value


def _name(name: Any) -> str:
    if not isinstance(name, str) or not is_safe_name(name) or name in (PART_NAME, MARKER_NAME):
        raise ValueError(f"{name!r} is not a plain path inside the part")
    return name
