"""Collectives on the CPU for small values: decisions, messages and errors, never tensors of the model.

    rank 0:      value --broadcast--> every rank
    every rank:  value --gather-----> rank 0          value --all_gather--> every rank
    some ranks:  tensors --exchange-> some ranks
    rank 0:      action --run_on_rank0--> its result, or its error, on every rank
    every rank:  action --run_on_all----> its own result, or an error on every rank
    every rank:  number --AsyncMax: all-reduce while the step is computed--> maximum

    a blocking C++ call            --call_interruptibly, on a thread of its own--> its result, or its error
    a collective in the background --wait_for_work, in slices of a second-------> done, or its error

Values are encoded by ``wire_format.py``, without pickle, which could run code in the reader. With a single process each
collective is trivial and does not use torch.distributed.

While a rank waits for the others it still handles signals, within a second. Python runs signal handlers between two
bytecode instructions of the main thread. A main thread that waits inside a library runs none until the library returns,
which may take ten minutes, or forever.

A signal may reach only some ranks, or reach them in different steps. A rank that stopped alone would leave the others
waiting in the next collective. With the maximum of their signal numbers all ranks stop after the same step.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.distributed.wire_format import MalformedMessage, decode, encode
from hlat.runtime.errors import HlatError, LaunchError, subclasses

T = TypeVar("T")

WAIT_SLICE = timedelta(seconds=1)  # interval at which a waiting process handles signals


def call_interruptibly(call: Callable[[], T], timeout: timedelta | None = None) -> T:
    """Run a call that may block for long, and handle signals meanwhile; TimeoutError after ``timeout``."""
    if timeout is None and threading.current_thread() is not threading.main_thread():
        return call()  # signal handlers run on the main thread only
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon: if a signal handler raises (Ctrl-C), or the time is over, it stays blocked, and the process ends without
    # it.
    threading.Thread(target=run, name="waiting", daemon=True).start()
    begin = time.monotonic()
    while not wait([outcome], WAIT_SLICE.total_seconds()).done:
        if timeout is not None and time.monotonic() - begin > timeout.total_seconds():
            raise TimeoutError(f"no answer within {timeout.total_seconds():g} s")
    return outcome.result()


def wait_for_work(work: dist.Work | None) -> None:
    """Wait for an asynchronous gloo collective in slices; RuntimeError if it failed, as when a peer has died."""
    assert work is not None, "this process is a member of the group"
    # Not for messages between two ranks: gloo aborts those at the end of the first slice.
    while True:
        try:
            work.wait(WAIT_SLICE)
        except RuntimeError:
            if not work.is_completed():  # only the slice has timed out
                continue
            work.wait()
        return


_HEAD = 1024  # bytes of the first message; short values need no second one
_LENGTH = 8  # bytes of these that hold the total length
_INLINE = _HEAD - _LENGTH


@sendable
@dataclass(frozen=True)
class _Failure:
    """An error to be sent to the other ranks."""

    kinds: tuple[str, ...]  # names of the error's type and its base classes, most specific first
    message: str
    attributes: dict[str, Any]  # attributes of the error that can be sent
    rank: int  # rank where it happened
    is_bug: bool = False  # True if it is not an ``HlatError``

    @classmethod
    def from_error(cls, error: Exception, rank: int) -> "_Failure":
        if isinstance(error, HlatError):
            kinds = tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, HlatError))
            return cls(kinds, str(error), {name: v for name, v in vars(error).items() if _may_be_sent(v)}, rank)
        text = f"rank {rank} failed with {type(error).__name__}: {error}"
        text = f"{text}. The traceback is in that rank's error report and log."
        return cls((LaunchError.__name__,), text, {}, rank, is_bug=True)

    def error(self, message: str | None = None) -> HlatError:
        # Only imported types: a message must not make this process import anything.
        known = {kind.__name__: kind for kind in subclasses(HlatError)}
        kind = next((known[name] for name in self.kinds if name in known), HlatError)
        error = kind.__new__(kind, message or self.message)
        vars(error).update(self.attributes)
        error.from_rank = self.rank
        return error


def _may_be_sent(value: object) -> bool:
    try:
        encode(value)
    except TypeError:
        return False
    return True


class HostGroup:
    """The processes of a run, as a gloo group for values on the CPU.

    All methods are collective: every rank calls the same ones in the same order. A peer that died raises an error at
    once, because its connections close; one that hangs raises it after a day.
    """

    def __init__(self, rank: int = 0, world: int = 1, group: dist.ProcessGroup | None = None) -> None:
        assert (world > 1) == (group is not None), "several processes need a group, a single one must have none"
        self.rank, self.world, self.group = rank, world, group

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank: any value that ``wire_format.encode`` accepts."""
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
        """Return all ranks' values in rank order on rank 0, and None on the others."""
        return self._gather(value, to_all=False)

    def all_gather(self, value: T) -> list[T]:
        """Return all ranks' values in rank order, on every rank."""
        values = self._gather(value, to_all=True)
        assert values is not None, "all_gather returns values on every rank"
        return values

    def _gather(self, value: T, to_all: bool) -> list[T] | None:
        if self.group is None:
            return [value]
        message = encode(value)
        heads = [torch.empty(_HEAD, dtype=torch.uint8) for _ in range(self.world)]
        wait_for_work(dist.all_gather(heads, _head(message), group=self.group, async_op=True))
        # gloo gathers tensors of one size only.
        longest = max(map(_length, heads)) - _INLINE
        rests = [_padded(b"", max(0, longest)) for _ in range(self.world)]
        if longest > 0:
            own = _padded(message[_INLINE:], longest)
            if to_all:
                work = dist.all_gather(rests, own, group=self.group, async_op=True)
            else:
                to = rests if self.is_first else None
                work = dist.gather(own, to, group_dst=0, group=self.group, async_op=True)
            wait_for_work(work)
        if not to_all and not self.is_first:
            return None
        return [_value(head, rest, rank) for rank, (head, rest) in enumerate(zip(heads, rests, strict=True))]

    def all_gather_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return all ranks' CPU tensors of one shape, stacked in rank order: (world, *shape)."""
        if self.group is None:
            return values.unsqueeze(0)
        rows = [torch.empty_like(values) for _ in range(self.world)]
        wait_for_work(dist.all_gather(rows, values, group=self.group, async_op=True))
        return torch.stack(rows)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            wait_for_work(dist.all_reduce(values, group=self.group, async_op=True))
        return values

    def exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send CPU tensors to some ranks and receive into others of the same size and dtype. Every rank calls it."""
        works = [dist.isend(tensor, group=self.group, group_dst=rank) for rank, tensor in sorted(sent.items())]
        works += [dist.irecv(tensor, group=self.group, group_src=rank) for rank, tensor in sorted(received.items())]
        for work in works:
            assert work is not None, "this process is a member of the group"
            call_interruptibly(work.wait)

    def subgroup(self, members: Sequence[int]) -> "HostGroup":
        """Return a group of some ranks. Only its members call it, with equal arguments."""
        if len(members) == 1:
            return HostGroup()
        group = call_interruptibly(
            lambda: dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        return HostGroup(list(members).index(self.rank), len(members), group)

    def barrier(self) -> None:
        if self.group is not None:
            wait_for_work(dist.barrier(group=self.group, async_op=True))

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 only, and return its result on every rank.

        Raises:
            HlatError: the action raised it: every rank raises the same type with the same message.
            LaunchError: it raised another error, which rank 0 itself raises unchanged.
        """
        if self.group is None:
            return action()
        if not self.is_first:
            outcome: T | _Failure = self.broadcast(None)  # type: ignore[assignment]  # sent by rank 0
            if isinstance(outcome, _Failure):
                raise outcome.error()
            return outcome
        try:
            result = action()
        except Exception as error:
            self.broadcast(_Failure.from_error(error, self.rank))
            raise
        return self.broadcast(result)

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run an action that must succeed on every rank; return this rank's result.

        Raises:
            Exception: this rank's own error, if the action failed here.
            HlatError: it failed elsewhere: the type of the first failed rank's error; the message names the ranks.
        """
        if self.group is None:
            return action()
        own: Exception | None = None
        try:
            result = action()
        except Exception as error:
            own = error
        outcomes = self.all_gather(None if own is None else _Failure.from_error(own, self.rank))
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
    """Length of a message and as much of it as fits: (1024,), uint8."""
    return _padded(len(message).to_bytes(_LENGTH, "little") + message[:_INLINE], _HEAD)


def _padded(content: bytes, size: int) -> torch.Tensor:
    """Bytes padded with zeros as a tensor: (size,), uint8."""
    out = torch.zeros(size, dtype=torch.uint8)
    out.numpy()[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return out


def _length(head: torch.Tensor) -> int:
    return int.from_bytes(head[:_LENGTH].numpy().tobytes(), "little")


def _value(head: torch.Tensor, rest: torch.Tensor, rank: int) -> Any:
    length = _length(head)
    message = head[_LENGTH : _LENGTH + length].numpy().tobytes() + rest[: max(0, length - _INLINE)].numpy().tobytes()
    try:
        return decode(message)
    except MalformedMessage as error:
        reason = f"received an invalid message instead of rank {rank}'s ({error})."
        raise LaunchError(f"{reason} Another program uses its port, or it runs another version of hlat.") from error


def format_ranks(ranks: list[int]) -> str:
    """Format sorted ranks compactly, as ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class AsyncMax:
    """A sequence of asynchronous max all-reduces, one at a time."""

    def __init__(self, ranks: HostGroup) -> None:
        self._group = ranks.group
        self._value = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._started = False

    def start(self, value: int) -> None:
        """Start with this rank's value (0: nothing requested); return at once."""
        assert not self._started, "the result of the previous all-reduce has not been read"
        self._started = True
        self._value.fill_(value)
        if self._group is not None:
            self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def result(self) -> int:
        """Wait for all ranks; return the maximum, the same on all of them."""
        assert self._started, "no all-reduce has been started"
        if self._work is not None:
            wait_for_work(self._work)
            self._work = None
        self._started = False
        return int(self._value.item())
