"""Seconds and rates of a layout's messages, as the cost model has them.

layout --comm_times--> seconds of one message by axis, with its bytes --> "0.41 ms (162 GB/s)"
"""

from dataclasses import dataclass

from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.constants import load_constants
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import rank_weights
from hlat.planner.search.search import workload_columns
from hlat.precision import MODES
from hlat.runtime.quantities.formatting import rounded_text


@dataclass(frozen=True)
class MessageTime:
    """One message.

    Attributes:
        seconds: seconds of the cost model, before anything hides them.
        bytes: bytes of the complete message, of each of the two halves of an all-reduce; 0 if they are not known here.
    """

    seconds: float
    bytes: float

    @property
    def rate(self) -> float:
        """Bytes per second, all of the message over all of its time."""
        return self.bytes / self.seconds

    def __str__(self) -> str:
        time = f"{self.seconds:.2f} s" if self.seconds >= 1 else f"{rounded_text(1000 * self.seconds)} ms"
        return f"{time} ({rounded_text(self.rate / 1e9)} GB/s)" if self.bytes else time


def message_times(request: PlanRequest, layout: Candidate) -> dict[str, MessageTime]:
    """Return one message of each kind: tensor, context, stage, gather, reduce, across (fields of ``CommTimes``)."""
    columns = workload_columns(request, [layout])
    times = comm_times(columns, load_constants())
    hidden, weights = float(2 * (columns.tokens * columns.hidden)[0]), float(rank_weights(columns)[0])
    gradients = float(columns.gradient_bytes[0])
    if (
        MODES[request.mode].compute.itemsize != 2
    ):  # the formulas count 16 bits and halve the rates: no bytes to be shown
        hidden = weights = 0.0
    sizes = {
        "tensor": hidden,
        "context": 0.0,
        "stage": hidden / layout.tensor,
        "gather": 2 * weights,
        "reduce": gradients * weights,
        "across": gradients * weights / layout.shards,
    }
    return {name: MessageTime(float(getattr(times, name)[0]), size) for name, size in sizes.items()}
