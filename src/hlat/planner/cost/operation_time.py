"""Times of single operations of a step, by the formulas and constants that its prediction is made of.

    workload -> OperationTimes -> seconds of a matrix product, of a message, of attention in a layer, of other kernels

A rehearsal records the operations of a real step; these are their times. Messages are timed by asking the formulas
about a workload whose message has that size. Sizes are nominal bytes: 16-bit elements count 2 bytes, and in fp32, where
the rates of the device are halved, elements of 4 bytes count 2 as well.
"""

from dataclasses import dataclass

import numpy as np

from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import Products, compute_times
from hlat.planner.cost.constants import Constants, load_constants
from hlat.planner.cost.step_time import matrix_time, step_times
from hlat.planner.problem.workload import RECOMPUTE_POLICIES, Column, WorkloadColumns, block_products, rank_weights

_FULL = float(RECOMPUTE_POLICIES.index("full"))


@dataclass(frozen=True)
class OperationTimes:
    """Seconds of the operations of one workload.

    Attributes:
        columns: the workload, one row.
        constants: constants of the time model.
        attention_forward, attention_backward: the attention core, one layer and micro-batch.
        others_forward, others_backward: everything in a layer that is neither product nor attention nor message:
            pointwise operations, gaps between kernels, casts, accumulation, waiting for the host; one layer and
            micro-batch; backward with what full recomputation repeats.
        loss: the loss without the products of the head, one micro-batch.
        context: keys and values exchanged forward, one layer and micro-batch.
        stage: one message between stages.
        gather, reduce: seconds per nominal byte of weights gathered, and of gradients reduced, by the data axis.
        recomputed: seconds of a recomputed operation, relative to its first run.
        update: memory traffic of the optimizer's step, without whole matrices.
        stragglers: waiting for the slowest device, per step.
    """

    columns: WorkloadColumns
    constants: Constants
    attention_forward: float
    attention_backward: float
    others_forward: float
    others_backward: float
    loss: float
    context: float
    stage: float
    gather: float
    reduce: float
    recomputed: float
    update: float
    stragglers: float

    @classmethod
    def of(cls, columns: WorkloadColumns, constants: Constants | None = None) -> "OperationTimes":
        """Time the operations of a workload.

        Args:
            columns: the workload, one row.
            constants: constants of the time model; None for those that predictions use.
        """
        known = constants or load_constants()
        compute, comm, step = compute_times(columns, known), comm_times(columns, known), step_times(columns, known)
        products = Products.of(columns, known)
        forward, backward = _layer_products(columns, products)
        # The share of pointwise operations is the host's too: both count per layer and micro-batch.
        host = compute.pointwise * step.host / step.pointwise
        others = compute.forward - forward - compute.attention_forward
        recomputed = np.where(columns.recompute == _FULL, known.column("recomputed", columns), 0.0)
        others_backward = compute.backward - backward - compute.attention_backward + recomputed * others
        rows = columns.vocab / columns.tensor
        head = sum(products.forward_and_backward(columns.tokens, rows, columns.hidden))
        weights = rank_weights(columns)
        return cls(
            columns,
            known,
            attention_forward=float(compute.attention_forward[0]),
            attention_backward=float(compute.attention_backward[0]),
            others_forward=float((others + host / 3)[0]),
            others_backward=float((others_backward + host * 2 / 3)[0]),
            loss=float((compute.head - head)[0]),
            context=float(comm.context[0]),
            stage=float(step.message[0]),
            gather=float((comm.gather / (2 * weights))[0]),
            reduce=float((comm.reduce / (columns.gradient_bytes * weights))[0]),
            recomputed=float(np.where(columns.recompute == _FULL, recomputed, 1.0)[0]),
            update=float((step.optimizer - matrix_time(columns, known))[0]),
            stragglers=float(step.stragglers[0]),
        )

    def products(self, shapes: Column, eight_bit: bool) -> Column:
        """Time matrix products.

        Args:
            shapes: (products, 4): number in a batch, rows, columns, and width that is summed over.
            eight_bit: True for products of fp8 operands.
        """
        count, rows, columns, width = np.asarray(shapes, dtype=np.float64).T
        found = Products.of(self.columns, self.constants).seconds(
            rows, columns, width, in_blocks=eight_bit, count=count
        )
        return np.broadcast_to(found, count.shape)

    def tensor_halves(self, sizes: Column) -> Column:
        """Time gathers or scatters of the tensor axis, half of an all-reduce each.

        Args:
            sizes: nominal bytes of the complete tensors.
        """
        tokens = sizes / (2 * self.columns.hidden)
        micro_batches = tokens * self.columns.context / self.columns.sequence
        seconds: Column = comm_times(self.columns.varied("micro_batch", micro_batches), self.constants).tensor / 2
        return seconds

    def handshake(self, ranks: int) -> float:
        """Time a message of a few bytes between all of some ranks."""
        hop = max(float(self.constants.column("hop", self.columns)[0]), float(self.columns.network_hop[0]))
        steps = 2 * np.ceil(np.log2(ranks)) if ranks > 1 else 0.0
        return float(self.constants.column("collective", self.columns)[0] + steps * hop)


def _layer_products(columns: WorkloadColumns, products: Products) -> tuple[Column, Column]:
    """Seconds of the products of a layer for one micro-batch, forward and backward, without casts and accumulation."""
    times = [
        products.forward_and_backward(columns.tokens, rows, width, in_blocks=True)
        for rows, width in block_products(columns)
    ]
    zero = np.zeros(len(columns))
    return sum((one[0] for one in times), zero), sum((one[1] + one[2] for one in times), zero)
