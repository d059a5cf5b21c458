"""Messages on their way to other stages, and the memory that they hold.

    send operations of a pass -> sent at once, the oldest are waited for -> at most PENDING_SENDS tensors are kept

Torch's schedules with several stages per rank, and GPipe, send after each pass and wait when the step ends, or its
forward half: until then every message of the step stays in memory.

Waiting earlier cannot block for ever. There is one order of all messages of which the order of every rank is a part:
torch appends a receive to its rank when it appends the send (``_add_send_recv`` in its schedules, the same in 2.11 to
2.14), and GPipe's messages are ordered by half, micro-batch and stage. The ranks of the first message that has not
ended have ended all earlier ones, so both come to it, and it ends, even if every send waits for its receive. With gloo
a wait blocks the process; with NCCL the stream, on which kernels, sends and receives keep the order of the process.
1F1B combines sends and receives in operations of its own, which stay as they are. A test lets ranks wait at every
message (tests/parallel/pipeline/test_waiting.py).
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _batch_p2p

from hlat.parallel.stages.memory.in_flight import PENDING_SENDS


class Outbox:
    """Sends the messages of a rank's stages.

    Args:
        at_once: False if the schedule sends a pass's messages together with receives (1F1B), and waits for both.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, operations: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        """Send messages.

        Args:
            operations: the sends of a pass.

        Returns:
            The operations that the schedule has to start.
        """
        if not self._at_once:
            return list(operations)
        for each in operations:
            # As schedules start their receives: by NCCL's communicator of the group in torch 2.11, of the pair in 2.12.
            (work,) = _batch_p2p([each])
            self._pending.append((work, each.tensor))
        self._wait_for_all_but(PENDING_SENDS)
        return []

    def wait(self) -> None:
        """Wait until all messages are sent."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._pending) > count:
            work, _ = self._pending.popleft()
            work.wait()
