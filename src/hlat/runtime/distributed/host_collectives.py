"""Talk between the processes of a run, on the CPU: decisions, messages and errors, never tensors of the model.

    rank 0:      value --broadcast--> every rank
    every rank:  value --gather-----> rank 0          value --all_gather--> every rank
    some ranks:  bytes --exchange---> some ranks
    rank 0:      action --first-----> its result, or its error, on every rank
    every rank:  action --each------> its own result, or an error on every rank

What is said travels as ``wire_format.py`` writes it: no pickle, which could run code where it is read. While a rank
waits for the others it hears signals. One process is a run like any other: each of these is then the obvious, without
torch.distributed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.distributed.waiting import call_interruptibly, wait_for_work
from hlat.runtime.distributed.wire_format import MalformedMessage, decode, encode
from hlat.runtime.errors import HlatError, LaunchError

T = TypeVar("T")


_HEAD = 1024  # bytes of the first message, which is the only one where it holds all there is to say
_LENGTH = 8  # of these, for the number of bytes in all
_INLINE = _HEAD - _LENGTH


@sendable
@dataclass(frozen=True)
class _Failure:
    """An error on its way to the other ranks: its type by name, those that it is a special case of after it."""

    kinds: tuple[str, ...]
    message: str
    attributes: dict[str, Any]
    rank: int
    is_bug: bool = False

    @classmethod
    def of(cls, error: Exception, rank: int) -> "_Failure":
        if isinstance(error, HlatError):
            kinds = tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, HlatError))
            return cls(kinds, str(error), {name: v for name, v in vars(error).items() if _may_be_sent(v)}, rank)
        text = f"rank {rank} failed with {type(error).__name__}: {error}"
        text = f"{text}. The traceback is in what that rank reports, and in its log."
        return cls((LaunchError.__name__,), text, {}, rank, is_bug=True)

    def error(self, message: str | None = None) -> HlatError:
        known = _errors(HlatError)
        kind = next((known[name] for name in self.kinds if name in known), HlatError)
        error = kind.__new__(kind, message or self.message)
        vars(error).update(self.attributes)
        error.from_rank = self.rank
        return error


def _errors(kind: type[HlatError]) -> dict[str, type[HlatError]]:
    """The types of errors that this process knows, by name."""
    found = {kind.__name__: kind}
    for special in kind.__subclasses__():
        found |= _errors(special)
    return found


def _may_be_sent(value: object) -> bool:
    try:
        encode(value)
    except TypeError:
        return False
    return True


class HostGroup:
    """The processes of a run, and this one among them. All methods are collective: every rank calls the same ones in
    the same order. A peer that died is an error at once (its connections close), one that hangs after a day.

    Attributes:
        rank: this process, 0 <= rank < world.
        world: how many there are.
        group: the gloo process group over all of them; None where there is one process.
    """

    def __init__(self, rank: int = 0, world: int = 1, group: dist.ProcessGroup | None = None) -> None:
        assert (world > 1) == (group is not None), "several processes need a group to talk over, one needs none"
        self.rank, self.world, self.group = rank, world, group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one that writes what there is one of."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank: anything ``wire.encode`` takes; the others' values are not looked at."""
        if self.group is None:
            return value
        message = encode(value) if self.is_first else b""
        head = _head(message)
        wait_for_work(dist.broadcast(head, group_src=0, group=self.group, async_op=True))
        length = _length(head)
        if length > _INLINE:
            rest = _padded(message[_INLINE:], length - _INLINE)
            wait_for_work(dist.broadcast(rest, group_src=0, group=self.group, async_op=True))
        else:
            rest = _padded(b"", 0)
        return value if self.is_first else _value(head, rest, 0)

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on rank 0, in the order of ranks; None on the others. Values as for ``broadcast``."""
        return self._collected(value, everywhere=False)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value on every rank, in the order of ranks. Values as for ``broadcast``."""
        values = self._collected(value, everywhere=True)
        assert values is not None, "every rank gets them"
        return values

    def _collected(self, value: T, everywhere: bool) -> list[T] | None:
        if self.group is None:
            return [value]
        message = encode(value)
        heads = [torch.empty(_HEAD, dtype=torch.uint8) for _ in range(self.world)]
        wait_for_work(dist.all_gather(heads, _head(message), group=self.group, async_op=True))
        longest = max(map(_length, heads)) - _INLINE
        rests = [_padded(b"", max(0, longest)) for _ in range(self.world)]
        if longest > 0:
            own = _padded(message[_INLINE:], longest)
            if everywhere:
                work = dist.all_gather(rests, own, group=self.group, async_op=True)
            else:
                to = rests if self.is_first else None
                work = dist.gather(own, to, group_dst=0, group=self.group, async_op=True)
            wait_for_work(work)
        if not everywhere and not self.is_first:
            return None
        return [_value(head, rest, rank) for rank, (head, rest) in enumerate(zip(heads, rests, strict=True))]

    def all_gather_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor on every rank, in the order of ranks: (world, *shape); on the CPU, of one shape."""
        if self.group is None:
            return values.unsqueeze(0)
        rows = [torch.empty_like(values) for _ in range(self.world)]
        wait_for_work(dist.all_gather(rows, values, group=self.group, async_op=True))
        return torch.stack(rows)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor, on every rank; on the CPU, added up in place."""
        if self.group is not None:
            wait_for_work(dist.all_reduce(values, group=self.group, async_op=True))
        return values

    def exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send tensors to some ranks and receive others from some, at the same time. Every rank calls it.

        Args:
            sent: rank -> a tensor on the CPU, contiguous; not this rank.
            received: rank -> where to put what it sends, of the same size and dtype.
        """
        works = [dist.isend(tensor, group=self.group, group_dst=rank) for rank, tensor in sorted(sent.items())]
        works += [dist.irecv(tensor, group=self.group, group_src=rank) for rank, tensor in sorted(received.items())]
        for work in works:
            assert work is not None, "this process is a member of the group"
            call_interruptibly(work.wait)

    def subgroup(self, members: Sequence[int]) -> "HostGroup":
        """Some of the ranks, this one among them, as ranks of their own; only they call it, each with the same ones."""
        if len(members) == 1:
            return HostGroup()
        group = call_interruptibly(
            lambda: dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        return HostGroup(list(members).index(self.rank), len(members), group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            wait_for_work(dist.barrier(group=self.group, async_op=True))

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Do something on rank 0 only; its result is every rank's.

        Raises:
            HlatError: the action failed on rank 0. Every rank raises the same type with the same message.
            LaunchError: it failed there with something else, which rank 0 raises as it is.
        """
        if self.group is None:
            return action()
        if not self.is_first:
            outcome: T | _Failure = self.broadcast(None)  # type: ignore[assignment]  # what rank 0 sends
            if isinstance(outcome, _Failure):
                raise outcome.error()
            return outcome
        try:
            result = action()
        except Exception as error:
            self.broadcast(_Failure.of(error, self.rank))
            raise
        return self.broadcast(result)

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Do something on every rank, which has to succeed on all of them. Returns this rank's result.

        Raises:
            Exception: this rank's own error, if the action failed here.
            HlatError: it failed elsewhere: of the first failed rank's type, naming the ranks and its message.
        """
        if self.group is None:
            return action()
        own: Exception | None = None
        try:
            result = action()
        except Exception as error:
            own = error
        outcomes = self.all_gather(None if own is None else _Failure.of(own, self.rank))
        failures = [outcome for outcome in outcomes if outcome is not None]
        if own is not None:
            raise own
        if failures:
            first = failures[0]
            named = first.message if first.is_bug else f"rank {first.rank}: {first.message}"
            others = f" ({format_ranks([failure.rank for failure in failures])} failed)" if len(failures) > 1 else ""
            raise first.error(f"{named}{others}")
        return result


def _head(message: bytes) -> torch.Tensor:
    """The length of a message, and as much of it as fits: (1024,), uint8."""
    return _padded(len(message).to_bytes(_LENGTH, "little") + message[:_INLINE], _HEAD)


def _padded(content: bytes, size: int) -> torch.Tensor:
    """Bytes, with zeros after them, as a tensor: (size,), uint8."""
    out = torch.zeros(size, dtype=torch.uint8)
    out.numpy()[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return out


def _length(head: torch.Tensor) -> int:
    return int.from_bytes(head[:_LENGTH].numpy().tobytes(), "little")


def _value(head: torch.Tensor, rest: torch.Tensor, rank: int) -> Any:
    """What a rank has sent."""
    length = _length(head)
    message = head[_LENGTH : _LENGTH + length].numpy().tobytes() + rest[: max(0, length - _INLINE)].numpy().tobytes()
    try:
        return decode(message)
    except MalformedMessage as error:
        reason = f"received an invalid message in place of rank {rank}'s ({error})."
        raise LaunchError(f"{reason} Another program answers in its place, or runs another version of hlat.") from error


def format_ranks(ranks: list[int]) -> str:
    """Sorted ranks, compactly: ``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
