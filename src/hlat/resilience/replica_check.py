"""Copies of weights and optimizer state that several ranks hold, and whether they are the same bits.

    HeldParameter, Piece -> which rows of which canonical tensor -> those that are held more than once
    --compare--> their digests on every rank, one gather --> Mismatch, the ranks that the others outvote

Copies are what data parallelism without sharding holds, replicas of shards, norm weights and kv heads that tensor ranks
share, and a tied embedding at both ends of a pipeline. They see the same updates, so they stay equal, unless memory, an
arithmetic unit or a link changed a bit on one of them.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hlat.model import HeldParameter
from hlat.model.derived import Piece
from hlat.optim import state_tensors
from hlat.resilience.tensor_hash import digest
from hlat.runtime.distributed import HostGroup, sendable

STEPS = "count of optimizer steps"


@sendable
@dataclass(frozen=True)
class Mismatch:
    """Copies that differ.

    Attributes:
        name: what they are copies of.
        copies: the rank and the digest of each.
    """

    name: str
    copies: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> set[int]:
        """Who holds a copy."""
        return {rank for rank, _ in self.copies}

    @property
    def outvoted(self) -> set[int]:
        """The ranks whose copies differ from what more than half of the copies are; nobody where there is no such
        majority, and the only rank where one holds them all.
        """
        if len(self.ranks) == 1:
            return self.ranks
        ((value, count),) = Counter(found for _, found in self.copies).most_common(1)
        return {rank for rank, found in self.copies if found != value} if 2 * count > len(self.copies) else set()


class Copies:
    """What the ranks of a run hold more than once. Making it, and its methods, are collective.

    Args:
        held: what this rank holds of the parameters.
        optimizer: over them.
        ranks: the processes of the run.

    Attributes:
        exist: whether there are any; the same on every rank.
    """

    def __init__(self, held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer, ranks: HostGroup) -> None:
        self._held, self._optimizer, self._ranks = held, optimizer, ranks
        here = [(index, piece) for index, one in enumerate(held) for piece in one.pieces()]
        numbers = [_number(_place(held[index], piece)) for index, piece in here]
        everyone = ranks.all_gather(numbers)
        count = Counter(number for of_rank in everyone for number in of_rank)
        self._shared = [one for one, number in zip(here, numbers, strict=True) if count[number] > 1]
        slots = [[number for number in of_rank if count[number] > 1] for of_rank in everyone]
        self._width = max(map(len, slots))
        self.exist = self._width > 0
        # every copy of every rank: where its digest is in what is gathered, and which is the first of the same piece
        self._where = [(rank, slot) for rank, of_rank in enumerate(slots) for slot in range(len(of_rank))]
        self._numbers = [number for of_rank in slots for number in of_rank]
        firsts: dict[int, int] = {}
        self._first = torch.tensor([firsts.setdefault(n, at) for at, n in enumerate(self._numbers)], dtype=torch.int64)

    def compare(self) -> list[Mismatch]:
        """What differs between copies; the same list on every rank. Waits for the device."""
        kinds, mine = self._digests()
        gathered = self._ranks.all_gather_tensor(mine)
        steps = gathered[:, -1].tolist()
        values_RKW = gathered[:, :-1].view(len(gathered), len(kinds), self._width)
        ranks, slots = torch.tensor(self._where).unbind(1)
        values_CK = values_RKW[ranks, :, slots]
        at, kind = (values_CK != values_CK[self._first]).nonzero(as_tuple=True)
        found = sorted({(k, self._numbers[c]) for c, k in zip(at.tolist(), kind.tolist(), strict=True)})
        names = self._names({number for _, number in found}) if found else {}
        mismatches = [
            Mismatch(
                f"{kinds[k]} of {names[number]}",
                tuple(
                    (rank, int(values_RKW[rank, k, slot]))
                    for (rank, slot), other in zip(self._where, self._numbers, strict=True)
                    if other == number
                ),
            )
            for k, number in found
        ]
        return mismatches if len(set(steps)) == 1 else [*mismatches, Mismatch(STEPS, tuple(enumerate(steps)))]

    def digests(self, names: Iterable[str]) -> dict[str, int]:
        """The digests of what mismatches have named, by these names, where copies are equal. Waits for the device."""
        wanted = set(names)
        kinds, mine = self._digests()
        values_KW = mine[:-1].view(len(kinds), self._width)
        here = {
            name: int(values_KW[k, slot])
            for k, kind in enumerate(kinds)
            for slot, (index, piece) in enumerate(self._shared)
            if (name := f"{kind} of {_place(self._held[index], piece)}") in wanted
        }
        if STEPS in wanted:
            here[STEPS] = int(mine[-1])
        return {name: value for found in self._ranks.all_gather(here) for name, value in found.items()}

    def _digests(self) -> tuple[list[str], torch.Tensor]:
        """Kinds of tensors, and the digests of this rank's copies: a row of ``width`` for each kind, then the steps.

        int64, on the CPU; where this rank has fewer copies than others, zeros.
        """
        kinds = {"weights": [one.tensor for one in self._held], **state_tensors(self._optimizer, self._held)}
        out = torch.zeros(len(kinds), self._width, dtype=torch.int64)
        found = [
            digest(_joined(self._held[index].rows_of(piece, tensors[index])))
            for tensors in kinds.values()
            for index, piece in self._shared
        ]
        if found:
            out[:, : len(self._shared)] = torch.stack(found).cpu().view(len(kinds), -1)
        return list(kinds), torch.cat((out.flatten(), self._steps()))

    def _steps(self) -> torch.Tensor:
        """The smallest and the largest count of steps of this rank's parameters, in one word: (1,)."""
        steps = torch.stack([self._optimizer.state[one.parameter]["step"] for one in self._held])
        low, high = steps.cpu().to(torch.int64).aminmax()
        return ((low << 32) + high).reshape(1)

    def _names(self, numbers: set[int]) -> dict[int, str]:
        """What the pieces of these numbers are; a rank knows the names of its own."""
        here = {_number(name): name for index, piece in self._shared if (name := _place(self._held[index], piece))}
        known = self._ranks.all_gather({number: name for number, name in here.items() if number in numbers})
        return {number: name for of_rank in known for number, name in of_rank.items()}


def _place(held: HeldParameter, piece: Piece) -> str:
    """Which part of which canonical tensor a piece is."""
    rows = f"rows {piece.canonical_start} to {piece.canonical_start + piece.rows - 1}"
    if not held.layout.columns:
        return f"{piece.name}, {rows}"
    first = held.layout.first_column
    return f"{piece.name}, {rows}, columns {first} to {first + held.layout.columns[0] - 1}"


def _number(place: str) -> int:
    """63 bits that stand for it: what ranks tell each other of hundreds of pieces is small."""
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8]) >> 1


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
