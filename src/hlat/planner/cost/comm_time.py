"""Time of communication: collectives by the network level that they cross.

    columns, constants -> CommTimes: tensor, context, pipeline and data parallelism

Ring collectives of n ranks (Thakur et al. 2005): each rank sends (n-1)/n of the message per half (a gather or a
scatter; an all-reduce is both), in n-1 steps, each with a latency. Each half also has a start-up time, and passes the
message once through the device's memory, which is why two ranks use less of their links than eight.

Ranks are assigned to devices as in mesh_layout.py: tensor innermost, then context, then data, pipeline outermost. A
group inside one fast-link domain uses the fast links. A group that spans domains is limited by the network; in each
instance it has the network shares of as many devices as it has members there.
"""

from dataclasses import dataclass

import numpy as np

from hlat.planner.cost.constants import Constants
from hlat.planner.problem import Column, WorkloadColumns, rank_weights

_TREE_STEPS = 8.0  # steps per doubling of the ranks: libraries use trees, not rings, for large groups


@dataclass(frozen=True)
class CommTimes:
    """Seconds of communication, before overlap.

    Attributes:
        tensor: one all-reduce of a layer (or a scatter and a gather); there are two forward and two backward.
        context: forward exchange of keys and values in a layer; the backward one takes twice as long.
        stage: one message between neighbouring stages, one way.
        gather: all-gather of all weights of a rank, in 16 bits.
        reduce: reduce-scatter of their gradients.
        members: ranks of a data-parallel group that share fast links.
    """

    tensor: Column
    context: Column
    stage: Column
    gather: Column
    reduce: Column
    members: Column


def comm_times(columns: WorkloadColumns, constants: Constants) -> CommTimes:
    """Time of the messages of each parallel axis on its links."""
    fast = columns.link_rate * constants.column("link", columns)
    net = columns.network_rate * constants.column("network", columns)
    hop = constants.column("hop", columns)
    share = net / columns.per_instance  # per device
    hidden = 2 * columns.tokens * columns.hidden

    inside = columns.tensor <= columns.domain
    half = _ring(hidden, columns.tensor, np.where(inside, fast, np.minimum(fast, net)), hop)
    passage = columns.memory_rate * constants.column("passage", columns)
    start = constants.column("collective", columns)
    tensor = 2 * (half + np.where(columns.tensor > 1, start + hidden / passage, 0.0))

    keys = 4 * columns.tokens * np.maximum(columns.kv_heads / columns.tensor, 1.0) * columns.head_dim
    near = columns.tensor * columns.context <= columns.domain
    context = (columns.context - 1) * keys / np.where(near, fast, np.minimum(fast, share))

    one_domain = columns.world <= np.maximum(columns.per_instance, columns.domain)
    stage = hidden / columns.tensor / np.where(one_domain, fast, np.minimum(fast, share))
    # Without sequence parallelism each tensor rank sends a slice; the receivers gather the slices over fast links.
    regather = np.where(columns.sequence_parallel > 0, 0.0, hidden * (columns.tensor - 1) / columns.tensor / fast)
    stage = np.where(columns.pipeline > 1, stage + regather + constants.column("message", columns), 0.0)

    shards = columns.shards
    # Members in the same instance, or in the same domain if that is larger, share its network.
    neighbours = np.floor(np.maximum(columns.domain, columns.per_instance) / columns.tensor)
    members = np.minimum(np.maximum(1.0, neighbours), shards)
    rate = np.where(shards > members, np.minimum(fast, share * members), fast)
    weights = rank_weights(columns)
    calls = np.where(columns.zero == 3, 1 + np.ceil(columns.layers / columns.pipeline), 1.0)
    steps = np.minimum(shards - 1, _TREE_STEPS * np.log2(np.maximum(shards, 2)))
    latency = np.where(shards > 1, calls * (start + steps * hop), 0.0)
    once = np.where(shards > 1, (shards - 1) / shards / rate + 1 / passage, 0.0) * weights
    return CommTimes(tensor, context, stage, 2 * once + latency, columns.gradient_bytes * once + latency, members)


def _ring(message: Column, ranks: Column, rate: Column, hop: Column) -> Column:
    """Seconds of a ring gather or scatter of a message of so many bytes; zero for a single rank."""
    return np.where(ranks > 1, (ranks - 1) * hop + (ranks - 1) / ranks * message / rate, 0.0)
