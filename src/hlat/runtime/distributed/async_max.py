"""Maximum of a number over all ranks, computed while the step runs; for example to agree on when to stop.

each rank: value --start--> all-reduce (max) in the background, while the step is computed --result--> maximum

A signal may reach only some ranks, or reach them in different steps. A rank that stopped alone would leave the others
waiting in the next collective. With the maximum of their signal numbers all ranks stop after the same step.
"""

import torch
import torch.distributed as dist

from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.waiting import wait_for_work


class AsyncMax:
    """A sequence of asynchronous max all-reduces, one at a time."""

    def __init__(self, ranks: HostGroup) -> None:
        self._group = ranks.group
        self._value = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._started = False

    def start(self, value: int) -> None:
        """Start the all-reduce with this rank's value (0: nothing requested). Returns at once."""
        assert not self._started, "the result of the previous all-reduce has not been read"
        self._started = True
        self._value.fill_(value)
        if self._group is not None:
            self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def result(self) -> int:
        """Wait for all ranks, and return the maximum of their values: the same on all of them."""
        assert self._started, "no all-reduce has been started"
        if self._work is not None:
            wait_for_work(self._work)
            self._work = None
        self._started = False
        return int(self._value.item())
