"""Who does what: every rank's place on the axes of a layout. The only place with rank arithmetic.

    world, degrees -> rank = ((pp * data + dp) * context + cp) * tensor + tp -> coordinates, groups of ranks

Axes from outermost to innermost are pipeline, data, context, tensor, so that the ranks of a tensor group, which talk
several times per layer, are neighbours on the fastest links, and pipeline stages, which talk least, are farthest apart.
The data axis is cut once more into replicas: inside one, neighbours again, optimizer state (and more) is sharded.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from hlat.config.sections import ParallelConfig

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank: pipeline rank, data-parallel, context-parallel and tensor-parallel index."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """The degrees of a layout, for a given number of processes."""

    pipeline: int
    data: int
    context: int
    tensor: int
    replicas: int
    config: ParallelConfig

    @classmethod
    def of(cls, config: ParallelConfig, world: int) -> "Layout":
        """The layout of a validated recipe on ``world`` processes."""
        data, rest = divmod(world, config.model_ranks)
        assert rest == 0 and data > 0 and data % config.replicas == 0, "the rules of a recipe require it"
        return cls(config.pipeline, data, config.context, config.tensor, config.replicas, config)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The degrees, in the order of ``AXES``."""
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
        """Whether activations between blocks are sharded over the tensor group."""
        return self.config.sequence and self.tensor > 1

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands."""
        coordinates = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            coordinates.append(index)
        return Coordinates(*reversed(coordinates))

    def rank(self, place: Coordinates) -> int:
        """The rank that stands there."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + getattr(place, axis)
        return rank

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on these axes only, ascending."""
        here = self.coordinates(rank)
        ranges = [
            range(size) if axis in axes else (getattr(here, axis),) for axis, size in zip(AXES, self.sizes, strict=True)
        ]
        return tuple(self.rank(Coordinates(*coordinates)) for coordinates in product(*ranges))

    def state_shards(self, rank: int) -> tuple[int, ...]:
        """The ranks over which a replica of the state that ``rank`` holds is sharded (ZeRO 1 to 3)."""
        size = self.data // self.replicas
        replica = self.coordinates(rank).dp // size
        return tuple(r for r in self.group(rank, "dp", "cp") if self.coordinates(r).dp // size == replica)

    def state_replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard of the state as ``rank``, one per replica."""
        size = self.data // self.replicas
        index = self.coordinates(rank).dp % size
        return tuple(r for r in self.group(rank, "dp") if self.coordinates(r).dp % size == index)

    def tensor_subgroup(self, rank: int, count: int) -> tuple[int, ...]:
        """The block of ``count`` neighbours in the tensor group that ``rank`` belongs to."""
        group = self.group(rank, "tp")
        first = self.coordinates(rank).tp // count * count
        return group[first : first + count]

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that runs a stage: one after another in rounds, or, in a V, there and back."""
        turn, index = divmod(stage, self.pipeline)
        return self.pipeline - 1 - index if self.config.schedule == "zbv" and turn % 2 else index

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages that a pipeline rank runs, ascending."""
        return [stage for stage in range(self.config.stages) if self.stage_rank(stage) == pipeline_rank]

    def remote_neighbour_stages(self, pipeline_rank: int) -> list[tuple[int, list[int]]]:
        """The stages of a pipeline rank, each with the stages on other ranks that it talks to.

        The two at the turn of a V share a rank, and send each other nothing.
        """
        return [
            (stage, [one for one in (stage - 1, stage + 1) if self._elsewhere(one, pipeline_rank)])
            for stage in self.stages_of(pipeline_rank)
        ]

    def _elsewhere(self, stage: int, pipeline_rank: int) -> bool:
        return 0 <= stage < self.config.stages and self.stage_rank(stage) != pipeline_rank

    def embedding_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks, in the pipeline of ``rank``, of the first and of the last stage; one where they are the same."""
        group = self.group(rank, "pp")
        return tuple(sorted({group[0], group[self.stage_rank(self.config.stages - 1)]}))

    def rows(self, rank: int, global_batch: int) -> range:
        """The sequences of a global batch that a rank's data-parallel group takes."""
        count = global_batch // self.data
        first = self.coordinates(rank).dp * count
        return range(first, first + count)

    def spans(self, rank: int, length: int) -> tuple[tuple[int, int], ...]:
        """The positions of a sequence that a rank takes, as (start, stop) pairs.

        Of 2 * context chunks the i-th and the i-th from the end: under a causal mask each pair costs the same.
        """
        if self.context == 1:
            return ((0, length),)
        index, chunk = self.coordinates(rank).cp, length // (2 * self.context)
        last = 2 * self.context - 1 - index
        return ((index * chunk, (index + 1) * chunk), (last * chunk, (last + 1) * chunk))
