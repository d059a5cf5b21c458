"""Replica check: compare the bits of weights and optimizer state that several ranks hold.

    LocalParameter, Piece -> rows of canonical tensors -> pieces that are stored on more than one rank
    --compare--> digests of every rank, one gather --> Mismatch with the outvoted ranks

Replicas exist in data parallelism without sharding, as replicated shards, as norm weights and kv heads that tensor
ranks share, and as a tied embedding at both ends of a pipeline. They receive the same updates, so they stay equal
unless memory, an arithmetic unit or a link changed a bit on one rank.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hlat.model import LocalParameter, RowBlock
from hlat.optim import Optimizer
from hlat.resilience.tensor_hash import digest
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable

STEPS = "count of optimizer steps"


@sendable
@dataclass(frozen=True)
class Mismatch:
    """Replicas that differ.

    Attributes:
        name: name of the replicated piece.
        digests: rank and digest of each replica.
    """

    name: str
    digests: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> set[int]:
        """Ranks that hold a replica."""
        return {rank for rank, _ in self.digests}

    @property
    def outvoted(self) -> set[int]:
        """Ranks whose replicas differ from the majority; empty without a majority.

        If a single rank holds all replicas, that rank.
        """
        if len(self.ranks) == 1:
            return self.ranks
        ((value, count),) = Counter(found for _, found in self.digests).most_common(1)
        return {rank for rank, found in self.digests if found != value} if 2 * count > len(self.digests) else set()


class ReplicaCheck:
    """Comparison of all pieces that ranks hold more than once. The constructor and all methods are collective.

    Args:
        held: the parameters, or shards of them, on this rank.
        optimizer: optimizer of these parameters.
        ranks: the processes of the run.
        extra: further kinds of tensors to compare, by name: a local tensor per parameter, in order.

    Attributes:
        has_replicas: True if any piece is replicated; the same on every rank.
    """

    def __init__(
        self,
        held: Sequence[LocalParameter],
        optimizer: Optimizer,
        ranks: HostGroup,
        extra: Mapping[str, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._held, self._optimizer, self._ranks, self._extra = held, optimizer, ranks, dict(extra or {})
        local = [(index, piece) for index, parameter in enumerate(held) for piece in parameter.row_blocks()]
        keys = [_key(_piece_name(held[index], piece)) for index, piece in local]
        keys_by_rank = ranks.all_gather(keys)
        count = Counter(key for rank_keys in keys_by_rank for key in rank_keys)
        self._replicated = [piece for piece, key in zip(local, keys, strict=True) if count[key] > 1]
        slots = [[key for key in rank_keys if count[key] > 1] for rank_keys in keys_by_rank]
        self._width = max(map(len, slots))
        self.has_replicas = self._width > 0
        # per replica: position of its digest in the gathered rows, its key, and the index of the piece's first replica
        self._positions = [(rank, slot) for rank, rank_keys in enumerate(slots) for slot in range(len(rank_keys))]
        self._keys = [key for rank_keys in slots for key in rank_keys]
        firsts: dict[int, int] = {}
        self._first = torch.tensor([firsts.setdefault(k, at) for at, k in enumerate(self._keys)], dtype=torch.int64)

    def compare(self) -> list[Mismatch]:
        """Return the replicas that differ; the same list on every rank. Synchronizes with the device."""
        kinds, own_digests = self._digests()
        gathered = self._ranks.all_gather_tensor(own_digests)
        steps = gathered[:, -1].tolist()
        values_RKW = gathered[:, :-1].view(len(gathered), len(kinds), self._width)
        ranks, slots = torch.tensor(self._positions).unbind(1)
        values_CK = values_RKW[ranks, :, slots]
        at, kind = (values_CK != values_CK[self._first]).nonzero(as_tuple=True)
        differing = sorted({(k, self._keys[c]) for c, k in zip(at.tolist(), kind.tolist(), strict=True)})
        names = self._names({key for _, key in differing}) if differing else {}
        mismatches = [
            Mismatch(
                f"{kinds[k]} of {names[key]}",
                tuple(
                    (rank, int(values_RKW[rank, k, slot]))
                    for (rank, slot), other in zip(self._positions, self._keys, strict=True)
                    if other == key
                ),
            )
            for k, key in differing
        ]
        return mismatches if len(set(steps)) == 1 else [*mismatches, Mismatch(STEPS, tuple(enumerate(steps)))]

    def replica_digests(self, names: Iterable[str]) -> dict[str, int]:
        """Return digests of equal replicas, by the names of earlier mismatches. Synchronizes with the device."""
        wanted = set(names)
        kinds, own_digests = self._digests()
        values_KW = own_digests[:-1].view(len(kinds), self._width)
        local = {
            name: int(values_KW[k, slot])
            for k, kind in enumerate(kinds)
            for slot, (index, piece) in enumerate(self._replicated)
            if (name := f"{kind} of {_piece_name(self._held[index], piece)}") in wanted
        }
        if STEPS in wanted:
            local[STEPS] = int(own_digests[-1])
        return {name: value for found in self._ranks.all_gather(local) for name, value in found.items()}

    def _digests(self) -> tuple[list[str], torch.Tensor]:
        """Return the kinds of tensors, and the digests of this rank's replicas: int64, (kinds * width + 1,).

        On the CPU. Each kind has a row of ``width`` digests; zeros for padding
        and for a parameter without such state. The last element is the step count.
        """
        kinds: dict[str, list[torch.Tensor | None]] = {
            "weights": [parameter.tensor for parameter in self._held],
            **self._optimizer.state_tensors(self._held),
            **{name: list(tensors) for name, tensors in self._extra.items()},
        }
        digests = torch.zeros(len(kinds), self._width, dtype=torch.int64)
        found = [
            (kind, slot, digest(_joined(self._held[index].row_views(piece, tensor))))
            for kind, tensors in enumerate(kinds.values())
            for slot, (index, piece) in enumerate(self._replicated)
            if (tensor := tensors[index]) is not None
        ]
        if found:
            rows, slots, computed = zip(*found, strict=True)
            digests[list(rows), list(slots)] = torch.stack(computed).cpu()
        return list(kinds), torch.cat((digests.flatten(), self._steps()))

    def _steps(self) -> torch.Tensor:
        """Return the smallest and largest step count of this rank's parameters, packed in one int64: (1,)."""
        steps = torch.stack([self._optimizer.state[held.parameter]["step"] for held in self._held])
        low, high = steps.cpu().to(torch.int64).aminmax()
        return ((low << 32) + high).reshape(1)

    def _names(self, keys: set[int]) -> dict[int, str]:
        """Return the names of pieces by key; each rank knows those of its own pieces. Collective."""
        local = {
            _key(name): name for index, piece in self._replicated if (name := _piece_name(self._held[index], piece))
        }
        known = self._ranks.all_gather({key: name for key, name in local.items() if key in keys})
        return {key: name for rank_names in known for key, name in rank_names.items()}


def _piece_name(held: LocalParameter, piece: RowBlock) -> str:
    """Return canonical tensor, rows and columns of a piece, in words."""
    rows = f"rows {piece.canonical_start} to {piece.canonical_start + piece.rows - 1}"
    if not held.layout.columns:
        return f"{piece.name}, {rows}"
    first = held.layout.first_column
    return f"{piece.name}, {rows}, columns {first} to {first + held.layout.columns[0] - 1}"


def _key(name: str) -> int:
    """Return a 63-bit hash of a name: smaller to gather than the names of hundreds of pieces."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
