"""Ranks as threads of one process, so that a protocol between them can be tested exhaustively.

If a thread ends with an error, the collective operations of the others fail, as they do when a process dies.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from hlat.runtime.distributed.host_collectives import HostGroup

T = TypeVar("T")


class ThreadRanks(HostGroup):
    """A rank that communicates with the others through shared memory."""

    def __init__(self, rank: int, table: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.world = rank, len(table)
        self.group = None if self.world == 1 else meeting  # type: ignore[assignment]
        self._table, self._meeting = table, meeting

    def all_gather(self, value: T) -> list[T]:
        self._table[self.rank] = value
        self._meeting.wait(600)
        values = list(self._table)
        self._meeting.wait(600)
        return values

    def gather(self, value: T) -> list[T] | None:
        values = self.all_gather(value)
        return values if self.is_first else None

    def broadcast(self, value: T) -> T:
        return self.all_gather(value)[0]

    def exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        posted = self.all_gather({rank: tensor.clone() for rank, tensor in sent.items()})
        for source, tensor in received.items():
            tensor.copy_(posted[source].pop(self.rank))

    def barrier(self) -> None:
        self.all_gather(None)


def run_on_ranks(world: int, work: Callable[[HostGroup], T]) -> list[T | BaseException]:
    """Run ``work`` on every rank; return its result, or its error, of each rank."""
    meeting, table = threading.Barrier(world), [None] * world

    def run(rank: int) -> T | BaseException:
        try:
            return work(ThreadRanks(rank, table, meeting))
        except BaseException as error:
            meeting.abort()
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def results_of(outcomes: list[T | BaseException]) -> list[T]:
    """Return the results of all ranks; raise the first error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]
