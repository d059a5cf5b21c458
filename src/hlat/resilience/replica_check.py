"""Replica check: compare the bits of weights and optimizer state that several ranks hold; find the wrong rank.

    LocalParameter, Piece -> rows of canonical tensors -> pieces that are stored on more than one rank
    --digest: bits as 64-bit words, each times an odd weight, sum modulo 2^64--> digests of every rank
    --one gather, compared--> Mismatch with the outvoted ranks
    --CorruptionIncident--> <run>/integrity.json --the step, repeated--> ranks that were wrong, or a repeated incident

Replicas exist in data parallelism without sharding, as replicated shards, as norm weights and kv heads that tensor
ranks share, and as a tied embedding at both ends of a pipeline. They receive the same updates, so they stay equal
unless memory, an arithmetic unit or a link changed a bit on one rank.

The digest is computed on the tensor's device at memory bandwidth. A flipped bit changes one word by plus or minus 2^b,
b < 64, and so the sum by 2^b times an odd number, which is never a multiple of 2^64: every change of a single bit is
detected. Several changes cancel only if the changes of the words, times their pseudo-random weights, add up to a
multiple of 2^64. The digest is not cryptographic.

Two replicas that differ do not show which one is right. But a step that is repeated in the same layout gives the same
bits, so its digests are those of a right replica: a rank that had another digest was wrong. A replica that received
gradients from a wrong one for more than a step is wrong itself; then no rank can be named.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hlat.model import LocalParameter, RowBlock
from hlat.optim import Optimizer
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable

STEPS = "count of optimizer steps"


@sendable
@dataclass(frozen=True)
class Mismatch:
    """Replicas of a piece that differ."""

    name: str  # of the replicated piece
    digests: tuple[tuple[int, int], ...]  # rank and digest of each replica

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in self.digests}

    @property
    def outvoted(self) -> set[int]:
        """Ranks whose replicas differ from the majority; empty without a majority."""
        # A single rank that holds all replicas is wrong whichever of them is.
        if len(self.ranks) == 1:
            return self.ranks
        ((value, count),) = Counter(found for _, found in self.digests).most_common(1)
        return {rank for rank, found in self.digests if found != value} if 2 * count > len(self.digests) else set()


class ReplicaCheck:
    """Comparison of all pieces that ranks hold more than once. The constructor and all methods are collective.

    ``held`` are the parameters, or shards of them, on this rank. ``extra`` has further kinds of tensors to compare, by
    name: a local tensor per parameter, in order.
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
        keys = [_piece_key(_piece_name(held[index], piece)) for index, piece in local]
        keys_by_rank = ranks.all_gather(keys)
        count = Counter(key for rank_keys in keys_by_rank for key in rank_keys)
        self._replicated = [piece for piece, key in zip(local, keys, strict=True) if count[key] > 1]
        slots = [[key for key in rank_keys if count[key] > 1] for rank_keys in keys_by_rank]
        self._width = max(map(len, slots))
        self.has_replicas = self._width > 0  # the same on every rank
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
        """Kinds of tensors, and digests of this rank's replicas on the CPU: int64, (kinds * width + 1,)."""
        kinds: dict[str, list[torch.Tensor | None]] = {
            "weights": [parameter.tensor for parameter in self._held],
            **self._optimizer.state_tensors(self._held),
            **{name: list(tensors) for name, tensors in self._extra.items()},
        }
        # A row of ``width`` for each kind; zeros are padding, or a parameter without such state. The step count comes
        # last.
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
        """Smallest and largest step count of this rank's parameters, packed in one int64: (1,)."""
        steps = torch.stack([self._optimizer.state[held.parameter]["step"] for held in self._held])
        low, high = steps.cpu().to(torch.int64).aminmax()
        return ((low << 32) + high).reshape(1)

    def _names(self, keys: set[int]) -> dict[int, str]:
        """Names of pieces by key. Collective."""
        local = {_piece_key(name): name for name in (_piece_name(self._held[at], it) for at, it in self._replicated)}
        # Each rank knows the names of its own pieces only.
        known = self._ranks.all_gather({key: name for key, name in local.items() if key in keys})
        return {key: name for rank_names in known for key, name in rank_names.items()}


def _piece_name(held: LocalParameter, piece: RowBlock) -> str:
    rows = f"rows {piece.canonical_start} to {piece.canonical_start + piece.rows - 1}"
    if not held.layout.columns:
        return f"{piece.name}, {rows}"
    first = held.layout.first_column
    return f"{piece.name}, {rows}, columns {first} to {first + held.layout.columns[0] - 1}"


def _piece_key(name: str) -> int:
    # A hash is smaller to gather than the names of hundreds of pieces; 63 bits fit an int64.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


_WORDS = 1 << 16  # words of a chunk: the words and weights of one chunk fit in cache
_CHUNKS = 64  # chunks at a time, on devices that store the products
_GOLDEN, _OTHER = -0x61C8864680B583EB, -0x3B314601E57A13AD  # odd; their multiples modulo 2^64 are pseudo-random
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor's elements in their order: an int64 scalar on its device.

    Equal bits give equal digests on every device: integer addition wraps the same way everywhere, in any order.
    """
    flat = tensor.reshape(-1)
    per_word = 8 // flat.element_size()
    in_words = flat.numel() // per_word * per_word
    # A view as int64 has to begin at a multiple of 8 bytes of the storage.
    aligned = flat[:in_words] if flat.storage_offset() % per_word == 0 else flat[:in_words].clone()
    words = aligned.view(torch.int64)
    rest = flat[in_words:].view(_INTEGERS[flat.element_size()]).to(torch.int64)
    chunks = words.numel() // _WORDS
    inner = _digest_weights(_WORDS + per_word, _GOLDEN, flat.device)
    outer = _digest_weights(chunks + 1, _OTHER, flat.device)
    sums = _digest_sums(words[: chunks * _WORDS].view(chunks, _WORDS), inner[:_WORDS])
    last = torch.cat((words[chunks * _WORDS :], rest))
    return (sums * outer[:chunks]).sum() + (last * inner[: last.numel()]).sum() * outer[chunks]


def _digest_sums(words_CW: torch.Tensor, weights_W: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the words of each chunk: (C, W), (W,) -> (C,)."""
    if backend_of(words_CW.device).has_integer_mv:
        return torch.mv(words_CW, weights_W)  # stores no products
    return _sums_of_products(words_CW, weights_W)


def _sums_of_products(words_CW: torch.Tensor, weights_W: torch.Tensor) -> torch.Tensor:
    sums = [(words * weights_W).sum(1) for words in words_CW.split(_CHUNKS)]
    return torch.cat(sums) if sums else words_CW.new_zeros(0)


@functools.lru_cache(maxsize=64)
def _digest_weights(count: int, multiplier: int, device: torch.device) -> torch.Tensor:
    # Weights are odd: the product of one with the change of a word is never 0 modulo 2^64.
    return torch.arange(1, count + 1, device=device) * multiplier | 1


@sendable
@dataclass(frozen=True)
class CorruptionIncident:
    """Replicas that differed after a step."""

    step: int  # after which they differed
    layout: str  # of the run, in words; only the same layout repeats the same bits
    mismatches: tuple[Mismatch, ...]
    hosts: tuple[str, ...]  # host name of each rank
    repeated: int = 1  # incidents in a row with the same ranks, including this one

    @classmethod
    def from_mismatches(
        cls,
        step: int,
        layout: str,
        mismatches: Sequence[Mismatch],
        hosts: Sequence[str],
        earlier: "CorruptionIncident | None",
    ) -> "CorruptionIncident":
        """Make the incident of these mismatches; ``earlier`` is the previous one, to count repetitions."""
        found = cls(step, layout, tuple(mismatches), tuple(hosts))
        if earlier is None or (found.suspects, found.suspect_hosts) != (earlier.suspects, earlier.suspect_hosts):
            return found
        return replace(found, repeated=earlier.repeated + 1)

    @property
    def outvoted(self) -> list[int]:
        return sorted({rank for mismatch in self.mismatches for rank in mismatch.outvoted})

    @property
    def suspects(self) -> list[int]:
        """Ranks of which at least one was wrong: the outvoted ones, or else all whose replicas differ."""
        return self.outvoted or sorted({rank for mismatch in self.mismatches for rank in mismatch.ranks})

    @property
    def suspect_hosts(self) -> list[str]:
        return [self.hosts[rank] for rank in self.suspects]

    def wrong_ranks(self, right: Mapping[str, int]) -> list[int]:
        """Ranks that differed from the digests of the repeated step, by name; empty if all of them did."""
        wrong = {
            rank for mismatch in self.mismatches for rank, digest in mismatch.digests if digest != right[mismatch.name]
        }
        holders = {rank for mismatch in self.mismatches for rank in mismatch.ranks}
        return sorted(wrong) if wrong != holders or len(holders) == 1 else []

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "layout": self.layout,
            "hosts": list(self.hosts),
            "repeated": self.repeated,
            "copies": {mismatch.name: [list(digest) for digest in mismatch.digests] for mismatch in self.mismatches},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "CorruptionIncident":
        """Make an incident from the values of ``state``; KeyError, TypeError or ValueError if they are invalid."""
        mismatches = tuple(
            Mismatch(str(name), tuple((int(rank), int(digest)) for rank, digest in digests))
            for name, digests in state["copies"].items()
        )
        hosts = tuple(str(host) for host in state["hosts"])
        if not mismatches or any(rank >= len(hosts) for mismatch in mismatches for rank in mismatch.ranks):
            raise ValueError("replicas of an unknown rank, or none")
        return cls(int(state["step"]), str(state["layout"]), mismatches, hosts, int(state["repeated"]))
