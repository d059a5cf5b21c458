"""Whether any rank wants the run to stop, asked without waiting.

each rank: flag --cast--> all-reduce (max) in the background, while the step is computed --result--> largest flag

A signal may reach one rank and not the others, or reach them in different steps. A rank that stopped by itself would
leave the others waiting in the next collective, so all stop after the same step: the one whose vote says so.
"""

import torch
import torch.distributed as dist

from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.waiting import wait_for_work


class AsyncMax:
    """One question after another, each cast and then counted by every rank."""

    def __init__(self, ranks: HostGroup) -> None:
        self._group = ranks.group
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._open = False

    def start(self, flag: int) -> None:
        """Say what this rank wants, such as the number of a signal; 0 is nothing. Returns at once."""
        assert not self._open, "the vote before this one has not been counted"
        self._open = True
        self._flag.fill_(flag)
        if self._group is not None:
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def result(self) -> int:
        """The largest flag that any rank cast: the same on all of them. Waits for the slowest to cast."""
        assert self._open, "nothing has been cast"
        if self._work is not None:
            wait_for_work(self._work)
            self._work = None
        self._open = False
        return int(self._flag.item())
