"""A part of a snapshot: what one rank had of the state, in a folder that says by itself whether it is whole.

    blocks of a rank --write_part--> rank-00003/  model__3_0.distcp ...   as in a checkpoint
                                                  part.json               where each block lies, sizes, sha256
                                                  COMMITTED               sha256 of part.json, the last file written
    folder --read_part--> Part --part_problems--> every byte compared

The folder appears by a rename, as a checkpoint does. Parts belong together if they have the same token: each snapshot
draws a new one, so that parts of two attempts at one step are never taken for one state.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format import (
    Disk,
    FileRecord,
    StoredChunk,
    TensorChunk,
    copy_file,
    make_folders,
    write_chunks,
    write_file,
)
from hlat.checkpoint.protocol.manifest import MARKER_NAME, STAGING_PREFIX, hash_file, is_safe_name
from hlat.runtime import CheckpointError
from hlat.runtime.distributed import sendable

PART_NAME = "part.json"

_FORMAT = 1


@sendable
@dataclass(frozen=True)
class RankPart:
    """What a part says of itself.

    Attributes:
        token: of the snapshot.
        step: optimizer steps done.
        rank: whose part it is.
        world: how many parts there are.
        files: path inside the folder -> size and hash.
        blocks: what of which tensor is in which file.
        meta: that of the checkpoint; of rank 0's part only.
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
        """Of its files."""
        return sum(record.bytes for record in self.files.values())


def part_folder_name(rank: int) -> str:
    """The name of the folder of a rank's part."""
    return f"rank-{rank:05d}"


def write_part(
    disk: Disk, final: Path, part: RankPart, chunks: Sequence[TensorChunk], copied: Mapping[str, Path]
) -> tuple[RankPart, bytes]:
    """Write a part durably.

    Args:
        disk: where its operations go.
        final: the folder that is to appear.
        part: without files and blocks.
        blocks: what is written.
        copied: path inside the folder -> file to copy there.

    Returns:
        The part, and the text of its ``part.json``.

    Raises:
        OSError: the disk refused. What was written stays for the caller to remove.
    """
    staging = final.with_name(STAGING_PREFIX + final.name)
    disk.remove_tree(staging)
    make_folders(disk, staging, inside=final.parent.parent)  # the run's, on this machine
    written = write_chunks(disk, staging, chunks, part.rank)
    records = dict(written.files)
    for name, source in copied.items():
        make_folders(disk, (staging / name).parent, inside=staging)
        records[name] = copy_file(disk, source, staging / name)
    whole = RankPart(part.token, part.step, part.rank, part.world, records, written.chunks, part.meta)
    text = _text(whole)
    finish_part(disk, staging, final, text)
    return whole, text


def finish_part(disk: Disk, staging: Path, final: Path, text: bytes) -> None:
    """Write what vouches for the files of a part, and give it its name. Raises OSError as the disk does."""
    record = write_file(disk, staging / PART_NAME, text)
    write_file(disk, staging / MARKER_NAME, record.sha256.encode())
    for folder in sorted(path for path in staging.rglob("*") if path.is_dir()):
        disk.sync_folder(folder)
    disk.sync_folder(staging)
    disk.rename(staging, final)
    for folder in (final.parent, final.parent.parent):
        disk.sync_folder(folder)


def read_part(folder: Path) -> RankPart:
    """What a part says of itself; its files are not looked at.

    Raises:
        CheckpointError: it is not one, or damaged.
    """
    try:
        marker, text = (folder / MARKER_NAME).read_bytes(), (folder / PART_NAME).read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{Path(exc.filename).name} cannot be read ({exc.strerror})") from exc
    if marker != hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{PART_NAME} does not match the checksum in {MARKER_NAME}")
    return parse_part(text)


def parse_part(text: bytes) -> RankPart:
    """The part that a ``part.json`` describes.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{PART_NAME} describes no part of a snapshot ({type(exc).__name__}: {exc})") from exc


def verify_part(folder: Path, part: RankPart) -> list[str]:
    """What of the files of a part is not as it was written; every byte is read."""
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
    """A part that goes into a checkpoint as it is: its files are copied, their hashes compared."""

    folder: Path
    part: RankPart

    def write(self, disk: Disk, target: Path) -> dict[str, FileRecord]:
        """Copy the files into a checkpoint that is being written.

        Raises:
            OSError: the disk refused.
            CheckpointError: a file is no longer what it was.
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
    plain = {"format": _FORMAT, "token": part.token, "step": part.step, "rank": part.rank, "world": part.world}
    files = {name: asdict(record) for name, record in sorted(part.files.items())}
    return json.dumps({**plain, "files": files, "blocks": chunks, "meta": part.meta}, allow_nan=False).encode()


def _parse(text: Any) -> RankPart:
    if text["format"] != _FORMAT:
        raise ValueError(f"format {text['format']!r} is not known to this version")
    numbers: dict[str, int] = {name: _count(text[name]) for name in ("step", "rank", "world")}
    files = {_name(name): FileRecord(_count(it["bytes"]), str(it["sha256"])) for name, it in text["files"].items()}
    chunks = [_chunk(entry) for entry in text["blocks"]]
    if any(chunk.file not in files for chunk in chunks):
        raise ValueError("a block lies in no file of the part")
    if text["meta"] is not None and not isinstance(text["meta"], dict):
        raise ValueError("meta is no object")
    return RankPart(str(text["token"]), **numbers, files=files, chunks=chunks, meta=text["meta"])


def _chunk(entry: Any) -> StoredChunk:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is no dtype")
    shape, offsets, sizes = (tuple(map(_count, entry[name])) for name in ("shape", "offsets", "sizes"))
    begin, length = _count(entry["begin"]), _count(entry["length"])
    return StoredChunk(str(entry["name"]), dtype, shape, offsets, sizes, _name(entry["file"]), begin, length)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _name(name: Any) -> str:
    if not isinstance(name, str) or not is_safe_name(name) or name in (PART_NAME, MARKER_NAME):
        raise ValueError(f"{name!r} is not a plain path inside the part")
    return name
