"""Copy the rank parts of each machine to another machine, so that the loss of one machine loses no part.

    machines in a ring        0 -> 1 -> 2 -> 0
    rank of a machine         its part --blocks--> the rank with the same index on the next machine --> files, hashed

The blocks are sent over the run's existing connections, so no extra port is opened. All ranks take part in the same
number of rounds; in each round a rank sends a block, receives blocks, or both. A rank whose disk fails continues to the
last round, because the other ranks would wait for it otherwise.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hlat.checkpoint.format.filesystem import Disk, HashedFile, make_folders
from hlat.checkpoint.protocol.manifest import STAGING_PREFIX
from hlat.checkpoint.protocol.rank_parts import RankPart, finish_part, parse_part
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError
from hlat.runtime.process.progress import advance

_PIECE = 1 << 24  # bytes sent per round; held in memory twice


def next_in_ring(nodes: Sequence[int]) -> list[int]:
    """Rank that stores the copy of each rank's part; the rank itself if there is only one machine.

    Args:
        nodes: machine number of each rank.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    ring = sorted(members)
    keepers = []
    for rank, node in enumerate(nodes):
        others = members[ring[(ring.index(node) + 1) % len(ring)]]
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

    Args:
        disk: file-system operations.
        ranks: processes of the run.
        keepers: keeper of each rank, from ``next_in_ring``.
        own: folder of this rank's part, the part, and the content of its ``part.json``.
        target: returns the folder on this machine for the part of a rank.

    Raises:
        OSError: a file-system operation failed. The caller must remove what was written so far.
        CheckpointError: a received file does not match its hash.
    """
    folder, part, text = own
    texts = ranks.all_gather(len(text))
    sources = [rank for rank, keeper in enumerate(keepers) if keeper == ranks.rank]
    received = {rank: bytearray() for rank in sources}
    _pump(ranks, keepers, texts, iter([text]), {rank: buffer.extend for rank, buffer in received.items()}, max(texts))
    receivers = {rank: _PartReceiver(disk, bytes(buffer), target(rank)) for rank, buffer in received.items()}
    sender = _PartSender(folder, part)
    sinks = {rank: receiver.take for rank, receiver in receivers.items()}
    _pump(ranks, keepers, ranks.all_gather(part.bytes), sender.blocks(), sinks, _PIECE)
    for errors in (sender.errors, *(receiver.errors for receiver in receivers.values())):
        for error in errors:
            raise error
    for receiver in receivers.values():
        receiver.finish()


def _pump(
    ranks: HostGroup,
    keepers: Sequence[int],
    sizes: Sequence[int],
    blocks: Iterator[bytes],
    sinks: Mapping[int, Callable[[memoryview], object]],
    block_bytes: int,
) -> None:
    """Send and receive in rounds: rank r sends ``sizes[r]`` bytes, in blocks of ``block_bytes``.

    Args:
        ranks: processes of the run.
        keepers: rank that each rank sends to.
        sizes: bytes that each rank sends.
        blocks: the blocks of this rank.
        sinks: sending rank -> function that takes a block received from it.
        block_bytes: bytes per block; the last one of a rank may be shorter.
    """
    for begin in range(0, max(sizes), block_bytes):
        count = {rank: max(0, min(block_bytes, sizes[rank] - begin)) for rank in [ranks.rank, *sinks]}
        sent = {}
        if count[ranks.rank]:
            sent[keepers[ranks.rank]] = torch.frombuffer(bytearray(next(blocks)), dtype=torch.uint8)
        buffers = {rank: torch.empty(count[rank], dtype=torch.uint8) for rank in sinks if count[rank]}
        ranks.exchange(sent, buffers)
        advance()
        for rank, buffer in buffers.items():
            sinks[rank](buffer.numpy().data)


class _PartSender:
    """Source of the bytes of a part: its files, one after another, in blocks of equal size except for the last."""

    def __init__(self, folder: Path, part: RankPart) -> None:
        self._folder, self._part = folder, part
        self.errors: list[Exception] = []

    def blocks(self) -> Iterator[bytes]:
        left, pending = self._part.bytes, bytearray()
        for data in self._read():
            pending += data
            while len(pending) >= _PIECE:
                left -= _PIECE
                yield bytes(pending[:_PIECE])
                del pending[:_PIECE]
        while left > 0:  # also after an error: the receiver expects part.bytes bytes
            size = min(_PIECE, left)
            left -= size
            yield bytes(pending[:size]).ljust(size, b"\0")
            del pending[:size]

    def _read(self) -> Iterator[bytes]:
        try:
            for name, record in sorted(self._part.files.items()):
                size = 0
                with (self._folder / name).open("rb") as file:
                    while data := file.read(min(_PIECE, record.bytes - size)):
                        size += len(data)
                        yield data
        except OSError as error:
            self.errors.append(error)


class _PartReceiver:
    """Writer of a part that is received in blocks; its errors are collected in ``errors``."""

    def __init__(self, disk: Disk, text: bytes, final: Path) -> None:
        self._disk, self._text, self._final = disk, text, final
        self._staging = final.with_name(STAGING_PREFIX + final.name)
        self._files = self._write_files()
        self._complete = False
        self.errors: list[Exception] = []
        self._resume(None)

    def take(self, data: memoryview) -> None:
        """Take the next block."""
        self._resume(data)

    def finish(self) -> None:
        """Rename the complete part to its final name. Raises OSError if a file-system operation fails."""
        assert self._complete, "as many bytes are received as the part has"
        finish_part(self._disk, self._staging, self._final, self._text)

    def _resume(self, data: memoryview | None) -> None:
        if self.errors or self._complete:
            return
        try:
            self._files.send(data)
        except StopIteration:
            self._complete = True
        except (OSError, CheckpointError) as error:
            self.errors.append(error)

    def _write_files(self) -> Generator[None, memoryview | None, None]:
        """Write the blocks sent into this generator, file by file."""
        self._disk.remove_tree(self._staging)
        make_folders(self._disk, self._staging, inside=self._final.parents[2])
        data = memoryview(b"")
        for name, record in sorted(parse_part(self._text).files.items()):
            path, left = self._staging / name, record.bytes
            make_folders(self._disk, path.parent, inside=self._staging)
            with HashedFile(self._disk, path) as file:
                while left:
                    if not data:
                        data = (yield) or data
                    count = file.write(data[:left])
                    file.check()
                    left, data = left - count, data[count:]
            if file.record != record:
                raise CheckpointError(f"{name} of {self._final.name} was not received as it was sent")
