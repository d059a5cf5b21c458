"""Time of communication: collectives by the network level that they cross.

    columns, constants -> CommTimes: tensor, context, pipeline and data parallelism

Ring collectives of n ranks (Thakur et al. 2005): each rank sends (n-1)/n of the message per half (a gather or a
scatter; an all-reduce is both), in n-1 steps, each with a latency. Each half also has a start-up time, and passes the
message once through the device's memory, which is why two ranks use less of their links than eight.

Ranks are assigned to devices as in parallel/layout.py: tensor innermost, then context, then data, pipeline outermost. A
group inside one fast-link domain uses the fast links. A group that spans domains is limited by the network. In each
instance it has the network shares of as many devices as it has members there.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.planner.cost.calibration import Constants
from hlat.planner.cost.program import HLAT, Program
from hlat.planner.problem.workload import Column, WorkloadColumns, rank_weights

_TREE_STEPS = 8.0  # steps per doubling of the ranks: libraries use trees, not rings, for large groups


@dataclass(frozen=True)
class CommTimes:
    """Seconds of communication, before overlap."""

    tensor: Column  # one all-reduce of a layer (or a scatter and a gather); two forward, two backward
    context: Column  # keys and values of a layer exchanged once, in a ring or in one gather
    stage: Column  # one message between neighbouring stages, one way
    gather: Column  # all-gather of all weights of a rank, in 16 bits
    reduce: Column  # reduce-scatter of their gradients
    across: Column  # all-reduce of gradient shards across replicas; 0 without hybrid sharding
    members: Column  # ranks of a data-parallel group that share fast links


def comm_times(columns: WorkloadColumns, constants: Constants, program: Program = HLAT) -> CommTimes:
    """Time of the messages of each parallel axis on its links."""
    fast = columns.link_rate * constants.column("link", columns)
    net = columns.network_rate * constants.column("network", columns)
    hop = constants.column("hop", columns)
    share = net / columns.per_instance  # per device
    hidden = 2 * columns.tokens * columns.hidden  # bytes in 16 bits

    inside = columns.tensor <= columns.domain
    near_hop, far_hop = (np.where(own > 0, own, hop) for own in (columns.hop, columns.network_hop))
    whole_chips = columns.tensor % columns.per_chip == 0
    rate = np.where(inside, fast, np.minimum(fast, net))
    steps = _steps(columns, columns.tensor, hidden, whole_chips) * np.where(inside, near_hop, far_hop)
    sent = program.tensor_share(columns) * hidden
    half = np.where(columns.tensor > 1, steps + (columns.tensor - 1) / columns.tensor * sent / rate, 0.0)
    passage = columns.memory_rate * constants.column("passage", columns)
    start = constants.column("collective", columns)
    passages = _passages(columns, hidden, whole_chips) * sent / passage
    tensor = 2 * (half + np.where(columns.tensor > 1, start + passages, 0.0))

    # keys and values, 2 bytes each
    keys = 4 * columns.tokens * np.maximum(columns.kv_heads / columns.tensor, 1.0) * columns.head_dim
    near = columns.tensor * columns.context <= columns.domain
    step = keys / np.where(near, fast, np.minimum(fast, share)) + _context_hop(columns, near, constants)
    context = program.context_exchange(columns, start, step, columns.context * keys / passage)
    context = np.where(columns.context > 1, context, 0.0)

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
    calls = program.gathers(columns, weights)
    far = constants.column("network_hop", columns)
    latency = start + _data_latency(columns, members, 2 * weights / calls, hop, far)
    latency = np.where(shards > 1, calls * latency, 0.0)
    once = np.where(shards > 1, (shards - 1) / shards / rate + 1 / passage, 0.0) * weights
    gather, reduce = 2 * once + latency, columns.gradient_bytes * once + latency

    # Ranks of an instance that store the same shard share its network for their sum.
    copies = np.minimum(columns.replicas, np.maximum(1.0, np.floor(neighbours / shards)))
    rate = np.where(columns.replicas > copies, np.minimum(fast, share * copies), fast)
    once = (columns.replicas - 1) / columns.replicas / rate + 1 / passage
    half = columns.gradient_bytes * weights / shards * once + calls * (start + _tree(columns.replicas) * far)
    across = np.where(columns.replicas > 1, 2 * half, 0.0)
    return CommTimes(tensor, context, stage, gather, reduce, across, members)


def _context_hop(columns: WorkloadColumns, near: NDArray[np.bool_], constants: Constants) -> Column:
    """Latency of a message between context ranks; ``near`` if their group is inside one domain."""
    inside = np.where(columns.hop > 0, columns.hop, constants.column("hop", columns))
    outside = np.where(columns.network_hop > 0, columns.network_hop, constants.column("network_hop", columns))
    return np.where(near, inside, outside)


def _steps(columns: WorkloadColumns, ranks: Column, message: Column, whole_chips: NDArray[np.bool_]) -> Column:
    """Steps of a gather or scatter of a complete ``message`` between ``ranks`` of an instance."""
    # Where the algorithm is chosen by size: small messages go to all chips at once, and are then exchanged inside a
    # chip; the distance between the chips of middle ones doubles; in the ring of large ones every second device of a
    # chip takes part, if the group has complete chips (the documentation's KangaRing).
    ring = ranks - 1
    chips = np.maximum(ranks / np.where(whole_chips, columns.per_chip, 1), 1)
    large = np.where(whole_chips & (columns.per_chip > 1), ranks / 2, ring)
    middle = np.ceil(np.log2(chips)) + 1
    by_size = np.where(message < columns.direct_bytes, 2.0, np.where(message < columns.doubling_bytes, middle, large))
    return np.where(columns.doubling_bytes > 0, np.minimum(by_size, ring), ring)


def _passages(columns: WorkloadColumns, message: Column, whole_chips: NDArray[np.bool_]) -> Column:
    """Passages of a message through the memory, relative to a ring's; the mean of a gather and a scatter."""
    halved = whole_chips & (columns.per_chip > 1) & (columns.doubling_bytes > 0) & (message >= columns.doubling_bytes)
    # A device of the ring of large messages reads once for two writes: 3 accesses instead of 4, and 4 instead of 6.
    return np.where(halved, (3 / 4 + 4 / 6) / 2, 1.0)


def _data_latency(columns: WorkloadColumns, members: Column, message: Column, hop: Column, far: Column) -> Column:
    """Seconds of the steps of a data-parallel gather or scatter, ``members`` of whose ranks share an instance."""
    # Libraries have trees for sums, but only rings for gathers and scatters: n - 1 steps, of which instances - 1 over
    # the network (NCCL's tuner). Where the algorithm is chosen by size, it is first one between instances, then one
    # inside.
    instances = np.ceil(columns.shards / members)
    # Slices of several instances (TPU, NVL72) gather on their own fast links first.
    flat = (instances > 1) & (columns.domain <= columns.per_instance)
    near = np.where(flat, instances * (members - 1), _tree(members))
    ring = near * hop + (instances - 1) * far
    inside = _steps(columns, members, message, columns.tensor == 1) * columns.hop
    return np.where(columns.doubling_bytes > 0, inside + _tree(instances) * columns.network_hop, ring)


def _tree(ranks: Column) -> Column:
    """Steps of a ring, or of trees where these are fewer."""
    return np.minimum(ranks - 1, _TREE_STEPS * np.log2(np.maximum(ranks, 2)))
