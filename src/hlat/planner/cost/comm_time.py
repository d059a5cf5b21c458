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
    share = net / columns.per_instance  # per device
    near, far = hops(columns, constants)
    start, passage = constants.column("collective", columns), columns.memory_rate * constants.column("passage", columns)
    hidden = 2 * columns.tokens * columns.hidden  # bytes in 16 bits

    inside = columns.tensor <= columns.domain
    rate = np.where(inside, fast, np.minimum(fast, net))
    steps = _steps(columns, columns.tensor, hidden, columns.tensor % columns.per_chip == 0)
    steps = start + steps * np.where(inside, near, far)
    sent = program.tensor_share(columns) * hidden
    half = steps + sent * ((columns.tensor - 1) / columns.tensor / rate + 1 / passage)
    tensor = np.where(columns.tensor > 1, 2 * half, 0.0)

    # keys and values, 2 bytes each
    keys = 4 * columns.tokens * np.maximum(columns.kv_heads / columns.tensor, 1.0) * columns.head_dim
    inside = columns.tensor * columns.context <= columns.domain
    step = keys / np.where(inside, fast, np.minimum(fast, share)) + np.where(inside, near, far)
    context = np.where(
        columns.context > 1, start + (columns.context - 1) * step + columns.context * keys / passage, 0.0
    )

    one_domain = columns.world <= np.maximum(columns.per_instance, columns.domain)
    stage = hidden / columns.tensor / np.where(one_domain, fast, np.minimum(fast, share))
    # Without sequence parallelism each tensor rank sends a slice; the receivers gather the slices over fast links.
    regather = np.where(columns.sequence_parallel > 0, 0.0, hidden * (columns.tensor - 1) / columns.tensor / fast)
    stage = np.where(columns.pipeline > 1, stage + regather + start, 0.0)

    shards = columns.shards
    # Members in the same instance, or in the same domain if that is larger, share its network.
    neighbours = np.floor(np.maximum(columns.domain, columns.per_instance) / columns.tensor)
    members = np.minimum(np.maximum(1.0, neighbours), shards)
    rate = np.where(shards > members, np.minimum(fast, share * members), fast)
    weights = rank_weights(columns)
    # One message per block, and one for embedding and head. Gradients that are summed whole are one.
    calls = np.where(columns.zero == 0, 1.0, 1 + np.ceil(columns.layers / columns.pipeline))
    latency = start + _data_latency(columns, members, 2 * weights / calls, near, far)
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


def hops(columns: WorkloadColumns, constants: Constants) -> tuple[Column, Column]:
    """Latency of a step over the fast links, and over the network: the machine's, or the constants'."""
    near = np.where(columns.hop > 0, columns.hop, constants.column("hop", columns))
    far = np.where(columns.network_hop > 0, columns.network_hop, constants.column("network_hop", columns))
    return near, far


def _steps(columns: WorkloadColumns, ranks: Column, message: Column, whole: NDArray[np.bool_]) -> Column:
    """Steps of a gather or scatter of a complete ``message`` between ``ranks`` of an instance; ``whole`` chips."""
    # Where the algorithm is chosen by size: small messages go to all chips at once, and are then exchanged inside a
    # chip; the distance between the chips of middle ones doubles; in the ring of large ones every second device of a
    # chip takes part, if the group has complete chips (AWS's documentation of Trainium2, KangaRing).
    ring = ranks - 1
    chips = np.maximum(ranks / np.where(whole, columns.per_chip, 1), 1)
    large = np.where(whole & (columns.per_chip > 1), ranks / 2, ring)
    middle = np.ceil(np.log2(chips)) + 1
    by_size = np.where(message < columns.direct_bytes, 2.0, np.where(message < columns.doubling_bytes, middle, large))
    return np.where(columns.doubling_bytes > 0, np.minimum(by_size, ring), ring)


def _data_latency(columns: WorkloadColumns, members: Column, message: Column, near: Column, far: Column) -> Column:
    """Seconds of the steps of a data-parallel gather or scatter, ``members`` of whose ranks share an instance."""
    # Libraries have trees for sums, but only rings for gathers and scatters: n - 1 steps, of which instances - 1 over
    # the network (NCCL's tuner). Where the algorithm is chosen by size, it is first one between instances, then one
    # inside. Slices of several instances (TPU, NVL72) gather on their own fast links first.
    instances = np.ceil(columns.shards / members)
    flat = (instances > 1) & (columns.domain <= columns.per_instance)
    inside = np.where(flat, instances * (members - 1), _tree(members)) * near
    by_size = _steps(columns, members, message, columns.tensor == 1) * near + _tree(instances) * far
    return np.where(columns.doubling_bytes > 0, by_size, inside + (instances - 1) * far)


def _tree(ranks: Column) -> Column:
    """Steps of a ring, or of trees where these are fewer."""
    return np.minimum(ranks - 1, _TREE_STEPS * np.log2(np.maximum(ranks, 2)))
