"""Seconds that ranks talk: collectives by the level of the network that they cross.

    columns, constants -> CommTimes: tensor, context, pipeline, data parallelism

Ring collectives of n ranks (Thakur et al. 2005): each rank sends (n-1)/n of the message per half (a gather or a
scatter; an all-reduce is both), in n-1 steps that each take a latency besides. A half has a start, and passes the
message once through the device's memory, which is why two ranks get less out of their links than eight.

Ranks are dealt out as in mesh_layout.py, tensor innermost, then context, then data, pipeline outermost. A group
inside one domain of fast links uses these; one that spans domains is limited by the network, of which it has as many
devices' shares as it has members in an instance.
"""

from dataclasses import dataclass

import numpy as np

from hlat.planner.cost.constants import Constants
from hlat.planner.problem import Column, WorkloadColumns, rank_weights

_MANY = 8.0  # a large ring's latency grows with the logarithm of its size: libraries then go over to trees


@dataclass(frozen=True)
class CommTimes:
    """Seconds, before anything is hidden.

    Attributes:
        tensor: one all-reduce of a layer (or a scatter and a gather); there are two forward and two backward.
        context: forward exchange of keys and values of a layer; backward is twice that.
        stage: one message from stage to stage, one way.
        gather, reduce: all weights of a rank gathered in 16 bits; their gradients scattered, or reduced and scattered.
        members: ranks of a data-parallel group that share a domain of fast links.
    """

    tensor: Column
    context: Column
    stage: Column
    gather: Column
    reduce: Column
    members: Column


def comm_times(columns: WorkloadColumns, constants: Constants) -> CommTimes:
    """What each kind of parallelism sends, in seconds on its links."""
    fast = columns.link_rate * constants.of("link", columns)
    net = columns.network_rate * constants.of("network", columns)
    hop = constants.of("hop", columns)
    share = net / columns.per_instance  # of one device
    hidden = 2 * columns.tokens * columns.hidden

    inside = columns.tensor <= columns.domain
    half = _ring(hidden, columns.tensor, np.where(inside, fast, np.minimum(fast, net)), hop)
    passage = columns.memory_rate * constants.of("passage", columns)
    start = constants.of("collective", columns)
    tensor = 2 * (half + np.where(columns.tensor > 1, start + hidden / passage, 0.0))

    keys = 4 * columns.tokens * np.maximum(columns.kv_heads / columns.tensor, 1.0) * columns.head_dim
    near = columns.tensor * columns.context <= columns.domain
    context = (columns.context - 1) * keys / np.where(near, fast, np.minimum(fast, share))

    one_domain = columns.world <= np.maximum(columns.per_instance, columns.domain)
    stage = hidden / columns.tensor / np.where(one_domain, fast, np.minimum(fast, share))
    # Each rank of a tensor group sends its part, and the receivers put them together over their fast links.
    whole = np.where(columns.sequence_parallel > 0, 0.0, hidden * (columns.tensor - 1) / columns.tensor / fast)
    stage = np.where(columns.pipeline > 1, stage + whole + constants.of("message", columns), 0.0)

    shards = columns.shards
    # Members of a group that share an instance, or a domain where that is larger, share its part of the network.
    near_each_other = np.floor(np.maximum(columns.domain, columns.per_instance) / columns.tensor)
    members = np.minimum(np.maximum(1.0, near_each_other), shards)
    rate = np.where(shards > members, np.minimum(fast, share * members), fast)
    weights = rank_weights(columns)
    calls = np.where(columns.zero == 3, 1 + np.ceil(columns.layers / columns.pipeline), 1.0)
    steps = np.minimum(shards - 1, _MANY * np.log2(np.maximum(shards, 2)))
    latency = np.where(shards > 1, calls * (start + steps * hop), 0.0)
    once = np.where(shards > 1, (shards - 1) / shards / rate + 1 / passage, 0.0) * weights
    return CommTimes(tensor, context, stage, 2 * once + latency, columns.gradient_bytes * once + latency, members)


def _ring(message: Column, ranks: Column, rate: Column, hop: Column) -> Column:
    """A gather or a scatter of a message among some ranks."""
    return np.where(ranks > 1, (ranks - 1) * hop + (ranks - 1) / ranks * message / rate, 0.0)
