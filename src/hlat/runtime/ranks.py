"""Talk between the processes of a run, on the CPU: decisions, messages and errors, never tensors of the model.

    rank 0:      value --broadcast--> every rank
    every rank:  value --gather-----> rank 0          value --all_gather--> every rank
    some ranks:  bytes --exchange---> some ranks
    rank 0:      action --first-----> its result, or its error, on every rank
    every rank:  action --each------> its own result, or an error on every rank

One process is a run like any other: each of these is then the obvious, without torch.distributed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hlat.runtime.errors import HlatError, LaunchError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the other ranks. The exception itself may not survive pickling: its constructor may
    take other arguments than the message."""

    kind: type[HlatError]
    message: str
    attributes: dict[str, Any]
    rank: int
    is_bug: bool = False

    @classmethod
    def of(cls, error: Exception, rank: int) -> "_Failure":
        if isinstance(error, HlatError):
            return cls(type(error), str(error), dict(vars(error)), rank)
        text = f"rank {rank} failed with {type(error).__name__}: {error}"
        return cls(LaunchError, f"{text}. The traceback is in what that rank reports, and in its log.", {}, rank, True)

    def error(self, message: str | None = None) -> HlatError:
        error = self.kind.__new__(self.kind, message or self.message)
        vars(error).update(self.attributes)
        error.from_rank = self.rank
        return error


class Ranks:
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
        """Rank 0's value, on every rank. It has to be picklable; the values of the other ranks are not looked at."""
        if self.group is None:
            return value
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return value if self.is_first else box[0]  # type: ignore[return-value]  # rank 0 put a T into it

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on rank 0, in the order of ranks; None on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.world if self.is_first else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value on every rank, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor on every rank, in the order of ranks: (world, *shape); on the CPU, of one shape."""
        if self.group is None:
            return values.unsqueeze(0)
        rows = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(rows, values, group=self.group)
        return torch.stack(rows)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor, on every rank; on the CPU, added up in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
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
            work.wait()

    def part(self, members: Sequence[int]) -> "Ranks":
        """Some of the ranks, this one among them, as ranks of their own; only they call it, each with the same ones."""
        if len(members) == 1:
            return Ranks()
        group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        return Ranks(list(members).index(self.rank), len(members), group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def first(self, action: Callable[[], T]) -> T:
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

    def each(self, action: Callable[[], T]) -> T:
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
            others = f" ({in_words([failure.rank for failure in failures])} failed)" if len(failures) > 1 else ""
            raise first.error(f"{named}{others}")
        return result


def in_words(ranks: list[int]) -> str:
    """Sorted ranks, compactly: ``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
