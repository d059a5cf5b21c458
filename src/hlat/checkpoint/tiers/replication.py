"""Each machine keeps a copy of the parts of another one: losing one machine loses no part.

    machines in a ring        0 -> 1 -> 2 -> 0
    rank of a machine         its part --pieces--> the rank of the next machine in the same place --> files, hashed

The pieces go over the run's own connections, so that nothing has to listen for them. All ranks go through the same
number of rounds, in which each sends a piece, receives one, or both: a rank whose disk refuses goes on to the end, so
that it does not leave the others waiting.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hlat.checkpoint.format import Disk, HashedFile, make_folders
from hlat.checkpoint.protocol import STAGING_PREFIX, RankPart, finish_part, parse_part
from hlat.runtime import CheckpointError
from hlat.runtime.distributed import HostGroup

_PIECE = 1 << 24  # bytes of a round, in memory twice


def next_in_ring(nodes: Sequence[int]) -> list[int]:
    """For each rank the one that keeps a copy of its part; itself where all are on one machine.

    Args:
        nodes: the machine of each rank.
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
    disk: Disk, ranks: HostGroup, keepers: Sequence[int], own: tuple[Path, RankPart, bytes], target: Callable[[int], Path]
) -> None:
    """Send this rank's part to its keeper, and keep those of others. Collective.

    Args:
        disk: where its operations go.
        ranks: the processes of the run.
        keepers: of each rank, as ``next_in_ring`` gives them.
        own: where this rank's part is, what it is, and the text of its ``part.json``.
        target: the folder that a rank's part gets here.

    Raises:
        OSError: the disk refused. What was written stays for the caller to remove.
        CheckpointError: a part did not arrive as it was sent.
    """
    folder, part, text = own
    texts = ranks.all_gather(len(text))
    sources = [rank for rank, keeper in enumerate(keepers) if keeper == ranks.rank]
    described = {rank: bytearray() for rank in sources}
    _pump(ranks, keepers, texts, iter([text]), {rank: box.extend for rank, box in described.items()}, max(texts))
    arrivals = {rank: _Arrival(disk, bytes(box), target(rank)) for rank, box in described.items()}
    departure = _Departure(folder, part)
    receivers = {rank: arrival.take for rank, arrival in arrivals.items()}
    _pump(ranks, keepers, ranks.all_gather(part.bytes), departure.pieces(), receivers, _PIECE)
    for errors in (departure.errors, *(arrival.errors for arrival in arrivals.values())):
        for error in errors:
            raise error
    for arrival in arrivals.values():
        arrival.finish()


def _pump(
    ranks: HostGroup,
    keepers: Sequence[int],
    sizes: Sequence[int],
    pieces: Iterator[bytes],
    receivers: Mapping[int, Callable[[memoryview], object]],
    piece: int,
) -> None:
    """Send and receive in rounds: of rank r ``sizes[r]`` bytes, in pieces of ``piece``."""
    for begin in range(0, max(sizes), piece):
        here = {rank: max(0, min(piece, sizes[rank] - begin)) for rank in [ranks.rank, *receivers]}
        sent = {}
        if here[ranks.rank]:
            sent[keepers[ranks.rank]] = torch.frombuffer(bytearray(next(pieces)), dtype=torch.uint8)
        boxes = {rank: torch.empty(here[rank], dtype=torch.uint8) for rank in receivers if here[rank]}
        ranks.exchange(sent, boxes)
        for rank, box in boxes.items():
            receivers[rank](box.numpy().data)


class _Departure:
    """The files of a part, one after another, as pieces of equal length but for the last."""

    def __init__(self, folder: Path, part: RankPart) -> None:
        self._folder, self._part = folder, part
        self.errors: list[Exception] = []

    def pieces(self) -> Iterator[bytes]:
        left, pending = self._part.bytes, bytearray()
        for data in self._read():
            pending += data
            while len(pending) >= _PIECE:
                left -= _PIECE
                yield bytes(pending[:_PIECE])
                del pending[:_PIECE]
        while left > 0:  # also after an error: as many bytes as were promised
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


class _Arrival:
    """A part that comes in pieces."""

    def __init__(self, disk: Disk, text: bytes, final: Path) -> None:
        self._disk, self._text, self._final = disk, text, final
        self._staging = final.with_name(STAGING_PREFIX + final.name)
        self._files = self._received()
        self._complete = False
        self.errors: list[Exception] = []
        self._go_on(None)

    def take(self, data: memoryview) -> None:
        """The next piece."""
        self._go_on(data)

    def finish(self) -> None:
        """Give the part its name, once all has come. Raises OSError as the disk does."""
        assert self._complete, "as many bytes come as the part has"
        finish_part(self._disk, self._staging, self._final, self._text)

    def _go_on(self, data: memoryview | None) -> None:
        if self.errors or self._complete:
            return
        try:
            self._files.send(data)
        except StopIteration:
            self._complete = True
        except (OSError, CheckpointError) as error:
            self.errors.append(error)

    def _received(self) -> Generator[None, memoryview | None, None]:
        """Writes what is sent into it, file by file."""
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
                raise CheckpointError(f"{name} of {self._final.name} did not arrive as it was sent")
