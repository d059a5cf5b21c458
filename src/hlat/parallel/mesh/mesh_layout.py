"""Parallel layout: coordinates of every rank on the mesh axes. All rank arithmetic is in this file.

    world, degrees -> rank = ((pp * data + dp) * context + cp) * tensor + tp -> coordinates, groups of ranks

The axes from outermost to innermost are pipeline, data, context, tensor. So the ranks of a tensor group, which
communicate several times per layer, are neighbours on the fastest links, and pipeline stages, which communicate least,
are farthest apart. The data axis is divided into replicas of neighbouring ranks; optimizer state (and more, depending
on the ZeRO stage) is sharded within a replica.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from hlat.config import ParallelConfig

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank on the mesh: pipeline, data-parallel, context-parallel and tensor-parallel index."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """The parallel section of a recipe on a given number of processes.

    Attributes:
        config: the parallel section, which has all degrees but one.
        data: data-parallel degree, which follows from the number of processes.
    """

    config: ParallelConfig
    data: int

    @classmethod
    def of(cls, config: ParallelConfig, world: int) -> "Layout":
        """Build the layout of a validated recipe on ``world`` processes."""
        data, rest = divmod(world, config.model_ranks)
        assert rest == 0 and data > 0 and data % config.replicas == 0, "recipe validation checks this"
        return cls(config, data)

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel degree."""
        return self.config.pipeline

    @property
    def context(self) -> int:
        """Context-parallel degree."""
        return self.config.context

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return self.config.tensor

    @property
    def replicas(self) -> int:
        """Number of replicas of the sharded state."""
        return self.config.replicas

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Degrees in the order of ``AXES``."""
        return (self.pipeline, self.data, self.context, self.tensor)

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def zero(self) -> int:
        """The ZeRO stage."""
        return self.config.zero

    @property
    def sequence_parallel(self) -> bool:
        """True if activations between blocks are sharded over the tensor group."""
        return self.config.sequence and self.tensor > 1

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        coordinates = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            coordinates.append(index)
        return Coordinates(*reversed(coordinates))

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at some coordinates."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + getattr(coordinates, axis)
        return rank

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on these axes only, ascending."""
        here = self.coordinates(rank)
        ranges = [
            range(size) if axis in axes else (getattr(here, axis),) for axis, size in zip(AXES, self.sizes, strict=True)
        ]
        return tuple(self.rank(Coordinates(*coordinates)) for coordinates in product(*ranges))

    def state_shards(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of one replica, over which the state of ``rank`` is sharded (ZeRO 1 to 3)."""
        size = self.data // self.replicas
        replica = self.coordinates(rank).dp // size
        return tuple(r for r in self.group(rank, "dp", "cp") if self.coordinates(r).dp // size == replica)

    def state_shard(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank in its ``state_shards``, and their number."""
        here, size = self.coordinates(rank), self.data // self.replicas
        return here.dp % size * self.context + here.cp, size * self.context

    def state_replica(self, rank: int, sharded: bool) -> tuple[int, ...]:
        """Identify the replica of a stage's state that a rank stores, or stores a shard of.

        Args:
            rank: the rank.
            sharded: True if state is sharded over ``state_shards``; else every data and context index has a replica.
        """
        here = self.coordinates(rank)
        return (here.dp // (self.data // self.replicas),) if sharded else (here.dp, here.cp)

    def state_replicas(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that store the same shard of the state as ``rank``, one per replica."""
        size = self.data // self.replicas
        index = self.coordinates(rank).dp % size
        return tuple(r for r in self.group(rank, "dp") if self.coordinates(r).dp % size == index)

    def tensor_subgroup(self, rank: int, count: int) -> tuple[int, ...]:
        """Return the ``count`` neighbouring ranks of the tensor group that include ``rank``."""
        group = self.group(rank, "tp")
        first = self.coordinates(rank).tp // count * count
        return group[first : first + count]

    def stage_rank(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage: ranks in order, repeated; for zbv in order, then in reverse."""
        round_, index = divmod(stage, self.pipeline)
        return self.pipeline - 1 - index if self.config.schedule == "zbv" and round_ % 2 else index

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the stages that a pipeline rank runs, ascending."""
        return [stage for stage in range(self.config.stages) if self.stage_rank(stage) == pipeline_rank]

    def remote_neighbour_stages(self, pipeline_rank: int) -> list[tuple[int, list[int]]]:
        """Return the stages of a pipeline rank, each with the stages on other ranks that it communicates with.

        The two stages at the turning point of zbv's V are on the same rank and send each other no messages.
        """
        return [
            (stage, [other for other in (stage - 1, stage + 1) if self._is_remote(other, pipeline_rank)])
            for stage in self.stages_of(pipeline_rank)
        ]

    def _is_remote(self, stage: int, pipeline_rank: int) -> bool:
        return 0 <= stage < self.config.stages and self.stage_rank(stage) != pipeline_rank

    def embedding_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the first and last stage in the pipeline of ``rank``; one if they are the same."""
        group = self.group(rank, "pp")
        return tuple(sorted({group[0], group[self.stage_rank(self.config.stages - 1)]}))

    def rows(self, rank: int, global_batch: int) -> range:
        """Return the sequences of a global batch that a rank's data-parallel index computes."""
        count = global_batch // self.data
        first = self.coordinates(rank).dp * count
        return range(first, first + count)

    def spans(self, rank: int, length: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of a sequence that a rank computes, as (start, stop) pairs.

        Context-parallel rank i has the i-th and the i-th last of 2 * context chunks: with a causal mask, every such
        pair of chunks costs the same.
        """
        if self.context == 1:
            return ((0, length),)
        index, chunk = self.coordinates(rank).cp, length // (2 * self.context)
        last = 2 * self.context - 1 - index
        return ((index * chunk, (index + 1) * chunk), (last * chunk, (last + 1) * chunk))
