"""Rank parts: a snapshot consists of one folder per rank, with the state stored on that rank and its own manifest.

    chunks of a rank --write_part--> rank-00003/  model__3_0.distcp ...   as in a checkpoint
                                                  part.json               position of each chunk, sizes, sha256
                                                  COMMITTED               sha256 of part.json, the last file written
    folder --read_part--> RankPart --verify_part--> every byte compared
    parts of a machine --replicate, in pieces--> the rank with the same index on the next machine --> files, hashed
                                                 machines in a ring: 0 -> 1 -> 2 -> 0

Like a checkpoint, the folder appears by an atomic rename. Parts belong to the same snapshot if they have the same
token. Each snapshot draws a new random token, so parts of two attempts at the same step are never combined.

With copies on another machine, the loss of one machine loses no part. The pieces are sent over the run's existing
connections, so no extra port is opened. All ranks take part in the same number of rounds; in each round a rank sends a
piece, receives pieces, or both. A rank whose disk fails continues to the last round, because the others wait for it.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format import newest_format
from hlat.checkpoint.format.filesystem import Disk, FileRecord, HashedFile, copy_file, make_folders, write_file
from hlat.checkpoint.format.format_1 import is_safe_name
from hlat.checkpoint.format.index import StoredChunk
from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.checkpoint.protocol.reader import MARKER_NAME, STAGING_PREFIX, hash_file
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError
from hlat.runtime.progress import advance

PART_NAME = "part.json"


@sendable
@dataclass(frozen=True)
class RankPart:
    """Manifest of a rank part, ``part.json``: the chunks and files that one rank has written."""

    token: str  # random, the same in all parts of a snapshot
    step: int  # optimizer steps done
    rank: int
    world: int  # world size, which is the number of parts
    files: Mapping[str, FileRecord]  # path inside the folder -> size and hash
    chunks: Sequence[StoredChunk]
    meta: Mapping[str, Any] | None  # of the checkpoint, in rank 0's part; None in the others

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


def part_folder_name(rank: int) -> str:
    """Folder name of a rank part, padded to five digits: 3 -> 'rank-00003'."""
    return f"rank-{rank:05d}"


def write_part(
    disk: Disk, final: Path, part: RankPart, chunks: Sequence[TensorChunk], copied: Mapping[str, Path]
) -> tuple[RankPart, bytes]:
    """Write a rank part and fsync it; ``part`` has no files and chunks yet. Returns it with them, and ``part.json``.

    OSError if the disk fails: the caller must remove what was written so far.
    """
    staging = final.with_name(STAGING_PREFIX + final.name)
    disk.remove_tree(staging)
    make_folders(disk, staging, inside=final.parent.parent)  # the run's snapshot folder on this machine
    written = newest_format().write_chunks(disk, staging, chunks, part.rank)
    records = dict(written.files)
    for name, source in copied.items():
        make_folders(disk, (staging / name).parent, inside=staging)
        records[name] = copy_file(disk, source, staging / name)
    complete = replace(part, files=records, chunks=written.chunks)
    text = _part_text(complete)
    finish_part(disk, staging, final, text)
    return complete, text


def finish_part(disk: Disk, staging: Path, final: Path, text: bytes) -> None:
    """Write ``part.json`` and the marker of a part, fsync, and rename the folder to its final name."""
    record = write_file(disk, staging / PART_NAME, text)
    write_file(disk, staging / MARKER_NAME, record.sha256.encode())
    # Names in folders are durable only after an fsync of the folder; all of it before the rename.
    for folder in sorted(path for path in staging.rglob("*") if path.is_dir()):
        disk.sync_folder(folder)
    disk.sync_folder(staging)
    disk.rename(staging, final)
    # The rename, and the folder of the snapshot, which may be new.
    for folder in (final.parent, final.parent.parent):
        disk.sync_folder(folder)


def read_part(folder: Path) -> RankPart:
    """Read the manifest of a part, and no other file; CheckpointError if it is damaged or no part."""
    try:
        marker, text = (folder / MARKER_NAME).read_bytes(), (folder / PART_NAME).read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{Path(exc.filename).name} cannot be read ({exc.strerror})") from exc
    if marker != hashlib.sha256(text).hexdigest().encode():
        raise CheckpointError(f"{PART_NAME} does not match the checksum in {MARKER_NAME}")
    return parse_part(text)


def parse_part(text: bytes) -> RankPart:
    """Parse the content of a ``part.json``; CheckpointError if it is invalid."""
    try:
        return _part_from(json.loads(text))
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
        """Copy the files into the staging folder of a checkpoint; CheckpointError if one does not match its hash."""
        for name, record in sorted(self.part.files.items()):
            make_folders(disk, (target / name).parent, inside=target)
            if copy_file(disk, self.folder / name, target / name) != record:
                raise CheckpointError(f"{self.folder / name}: does not match its checksum")
        # ``commit`` syncs the staging folder itself.
        for folder in sorted({(target / name).parent for name in self.part.files} - {target}):
            disk.sync_folder(folder)
        return dict(self.part.files)


def _part_text(part: RankPart) -> bytes:
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


def _part_from(text: Any) -> RankPart:
    if text["format"] != newest_format().version:  # its tensor files become those of a checkpoint
        raise ValueError(f"format {text['format']!r} is unknown to this version")
    numbers: dict[str, int] = {name: _count_from(text[name]) for name in ("step", "rank", "world")}
    files = {
        _name_from(name): FileRecord(_count_from(it["bytes"]), str(it["sha256"])) for name, it in text["files"].items()
    }
    chunks = [_chunk_from(entry) for entry in text["blocks"]]
    if any(chunk.file not in files for chunk in chunks):
        raise ValueError("a chunk lies in a file that the part does not have")
    if text["meta"] is not None and not isinstance(text["meta"], dict):
        raise ValueError("meta is not an object")
    return RankPart(str(text["token"]), **numbers, files=files, chunks=chunks, meta=text["meta"])


def _chunk_from(entry: Any) -> StoredChunk:
    # A damaged name may be any attribute of torch, or none.
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    shape, offsets, sizes = (tuple(map(_count_from, entry[name])) for name in ("shape", "offsets", "sizes"))
    begin, length = _count_from(entry["begin"]), _count_from(entry["length"])
    return StoredChunk(str(entry["name"]), dtype, shape, offsets, sizes, _name_from(entry["file"]), begin, length)


def _count_from(value: Any) -> int:
    # Not isinstance: bool is an int.
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return value


def _name_from(name: Any) -> str:
    # A hostile part must not write outside its folder, nor replace its own manifest.
    if not isinstance(name, str) or not is_safe_name(name) or name in (PART_NAME, MARKER_NAME):
        raise ValueError(f"{name!r} is not a plain path inside the part")
    return name


_PIECE = 1 << 24  # bytes of a file that are sent per round; held in memory twice


def next_in_ring(nodes: Sequence[int]) -> list[int]:
    """Rank that keeps the copy of each rank's part, from the machine of each rank; itself on a single machine."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    ring = sorted(members)
    keepers = []
    for rank, node in enumerate(nodes):
        others = members[ring[(ring.index(node) + 1) % len(ring)]]
        # Modulo: the next machine may have fewer ranks.
        keepers.append(others[members[node].index(rank) % len(others)] if len(ring) > 1 else rank)
    return keepers


def replicate(
    disk: Disk,
    ranks: HostGroup,
    keepers: Sequence[int],
    own: tuple[Path, RankPart, bytes],
    target: Callable[[int], Path],
) -> None:
    """Send this rank's part to its keeper, and store the parts that this rank keeps for others. Collective.

    ``own`` is the folder of the part, the part and its ``part.json``; ``target`` gives the folder for a rank's part.

    OSError if the disk fails, CheckpointError if a file differs from its hash: the caller must remove what was written.
    """
    folder, part, text = own
    keeper, errors = keepers[ranks.rank], list[Exception]()
    # The manifests first: a keeper has to know the files before their bytes come.
    lengths = ranks.all_gather(len(text))
    kept = [rank for rank, other in enumerate(keepers) if other == ranks.rank]
    texts = {rank: torch.empty(lengths[rank], dtype=torch.uint8) for rank in kept}
    ranks.exchange({keeper: _as_tensor(text)}, texts)
    receivers = {rank: _PartReceiver(disk, texts[rank].numpy().tobytes(), target(rank)) for rank in kept}
    own_pieces, expected = _pieces(part), {rank: _pieces(receiver.part) for rank, receiver in receivers.items()}
    for _ in range(max(ranks.all_gather(len(list(_pieces(part)))))):
        piece, due = next(own_pieces, None), {rank: next(pieces, None) for rank, pieces in expected.items()}
        sent = {} if piece is None else {keeper: _read_piece(folder, *piece, errors)}
        # Sizes are known to both sides, so no round needs a header.
        buffers = {rank: torch.empty(each[2], dtype=torch.uint8) for rank, each in due.items() if each is not None}
        ranks.exchange(sent, buffers)
        advance()
        for rank, buffer in buffers.items():
            receivers[rank].take(buffer.numpy().data)
    # Only now: all ranks have to take part in every round.
    for error in (*errors, *(error for receiver in receivers.values() for error in receiver.errors)):
        raise error
    for receiver in receivers.values():
        receiver.finish()


def _pieces(part: RankPart) -> Iterator[tuple[str, int, int]]:
    """Yield file, first byte and size of each piece that is sent in a round."""
    for name, record in sorted(part.files.items()):
        for begin in range(0, record.bytes, _PIECE):
            yield name, begin, min(_PIECE, record.bytes - begin)


def _read_piece(folder: Path, name: str, begin: int, size: int, errors: list[Exception]) -> torch.Tensor:
    data = b""
    try:
        with (folder / name).open("rb") as file:
            file.seek(begin)
            data = file.read(size)
    except OSError as error:
        errors.append(error)
    # Zeros for what could not be read: the hash will not match, and this rank raises its error.
    return _as_tensor(data.ljust(size, b"\0"))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _PartReceiver:
    """Writer of a part that arrives in pieces; ``errors`` has what failed, so that the rounds can go on."""

    def __init__(self, disk: Disk, text: bytes, final: Path) -> None:
        self._disk, self._text, self._final, self.part = disk, text, final, parse_part(text)
        self._staging = final.with_name(STAGING_PREFIX + final.name)
        self._files = self._write_files()
        self._complete = False
        self.errors: list[Exception] = []
        self.take(None)

    def finish(self) -> None:
        assert self._complete, "as many bytes are received as the part has"
        finish_part(self._disk, self._staging, self._final, self._text)

    def take(self, data: memoryview | None) -> None:
        if self.errors or self._complete:
            return
        try:
            self._files.send(data)
        except StopIteration:
            self._complete = True
        except (OSError, CheckpointError) as error:
            self.errors.append(error)

    def _write_files(self) -> Generator[None, memoryview | None, None]:
        """Write the pieces sent into this generator, file by file."""
        self._disk.remove_tree(self._staging)
        make_folders(self._disk, self._staging, inside=self._final.parents[2])
        for name, record in sorted(self.part.files.items()):
            path = self._staging / name
            make_folders(self._disk, path.parent, inside=self._staging)
            with HashedFile(self._disk, path) as file:
                for _ in range(0, record.bytes, _PIECE):
                    data = yield
                    assert data is not None, "each piece is sent"
                    file.write(data)
                    file.check()
            if file.record != record:
                raise CheckpointError(f"{name} of {self._final.name} was not received as it was sent")
