"""Replicas of a model in several processes, which compute batches for rank 0.

    rank 0: a batch for each data-parallel replica --> every rank computes that of its replica --> gathered on rank 0
    other ranks: serve, until rank 0 has finished or failed

Tensor-parallel ranks of a replica compute the same batch. A round ends when every replica has computed its batch, so
that rank 0 can store the responses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hlat.runtime.distributed.host_collectives import HostGroup

Compute = Callable[[Any], list[Any]]
"""Computes the responses of a batch, which can be sent to other processes."""

_END = "end"
_NOTHING: tuple[str, list[Any]] = ("", [])  # the argument of a broadcast on other ranks than 0, which is ignored


class Replicas:
    """The replicas of a model, of which this process has one, or a shard of one.

    Args:
        ranks: all processes.
        count: number of replicas.
        index: replica of this process.
        reports: True for one process of each replica.
        compute: functions that compute batches, by kind of batch.
    """

    def __init__(self, ranks: HostGroup, count: int, index: int, reports: bool, compute: Mapping[str, Compute]) -> None:
        self._ranks, self._index, self._reports, self._compute = ranks, index, reports, compute
        self.count = count

    def compute(self, kind: str, batches: Sequence[Any]) -> list[list[Any]]:
        """Compute batches, at most one for each replica; only on rank 0, while the others serve.

        Returns:
            The responses of each batch.
        """
        assert len(batches) <= self.count, "a round has a batch for each replica"
        self._ranks.broadcast((kind, list(batches)))
        return self._round(kind, batches)

    def serve(self) -> None:
        """Compute the batches that rank 0 sends, until it calls ``end``; on all other ranks."""
        while True:
            kind, batches = self._ranks.broadcast(_NOTHING)
            if kind == _END:
                return
            self._round(kind, batches)

    def end(self) -> None:
        """End ``serve`` on the other ranks."""
        self._ranks.broadcast((_END, []))

    def _round(self, kind: str, batches: Sequence[Any]) -> list[list[Any]]:
        own = batches[self._index] if self._index < len(batches) else None
        result = self._ranks.run_on_all(lambda: [] if own is None else self._compute[kind](own))
        gathered = self._ranks.gather((self._index, result) if self._reports else None) or []
        by_replica = dict(each for each in gathered if each is not None)
        return [by_replica[index] for index in range(len(batches))] if by_replica else []
