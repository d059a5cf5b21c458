"""Parallel layout of all ranks, and the shape of a training step. All rank arithmetic is in this file.

    world, degrees -> rank = ((pp * data + dp) * context + cp) * tensor + tp -> coordinates, groups of ranks
    recipe, world size | a candidate layout of the planner -> StepShape -> layers of stages, bytes of ranks

The axes from outermost to innermost are pipeline, data, context, tensor. So the ranks of a tensor group, which
communicate several times per layer, are neighbours on the fastest links, and pipeline stages, which communicate least,
are farthest apart. The data axis is divided into replicas of neighbouring ranks; optimizer state (and more, depending
on the ZeRO stage) is sharded within a replica.

Nothing in a step shape is measured or depends on the device, so that every rank, a rehearsal and a plan of the same
recipe compute the same stages.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from hlat.config import AdamWConfig, ModelConfig, OptimizerConfig, ParallelConfig, Recipe

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


class Coordinates(NamedTuple):
    """Coordinates of a rank on the mesh: pipeline, data-parallel, context-parallel and tensor-parallel index."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """The parallel section of a recipe on a given number of processes."""

    parallel: ParallelConfig  # section of the recipe; has all degrees but one
    data: int  # data-parallel degree, which follows from the number of processes

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> "Layout":
        data, rest = divmod(world, parallel.model_ranks)
        assert rest == 0 and data > 0 and data % parallel.replicas == 0, "recipe validation checks this"
        return cls(parallel, data)

    @property
    def pipeline(self) -> int:
        return self.parallel.pipeline

    @property
    def context(self) -> int:
        return self.parallel.context

    @property
    def tensor(self) -> int:
        return self.parallel.tensor

    @property
    def replicas(self) -> int:
        """Copies of the sharded state; more than one is hybrid sharding."""
        return self.parallel.replicas

    @property
    def shards(self) -> int:
        """Ranks that state may be sharded over: those of a replica, context-parallel ones included."""
        return self.data // self.replicas * self.context

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Degrees in the order of ``AXES``."""
        return (self.pipeline, self.data, self.context, self.tensor)

    @property
    def world(self) -> int:
        return self.parallel.model_ranks * self.data

    @property
    def zero(self) -> int:
        return self.parallel.zero

    @property
    def sequence_parallel(self) -> bool:
        """True if activations between blocks are sharded over the tensor group."""
        return self.parallel.shards_sequences

    def coordinates(self, rank: int) -> Coordinates:
        rest, tp = divmod(rank, self.tensor)
        rest, cp = divmod(rest, self.context)
        return Coordinates(*divmod(rest, self.data), cp, tp)

    def rank(self, here: Coordinates) -> int:
        return ((here.pp * self.data + here.dp) * self.context + here.cp) * self.tensor + here.tp

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on these axes only, ascending."""
        every = zip(AXES, self.sizes, self.coordinates(rank), strict=True)
        ranges = [range(size) if axis in axes else (index,) for axis, size, index in every]
        return tuple(self.rank(Coordinates(*coordinates)) for coordinates in product(*ranges))

    def state_shards(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of one replica, over which the state of ``rank`` is sharded (ZeRO 1 to 3)."""
        replica = self.state_replica(rank, True)
        return tuple(r for r in self.group(rank, "dp", "cp") if self.state_replica(r, True) == replica)

    def state_shard(self, rank: int) -> int:
        """Return the index of a rank in its ``state_shards``."""
        here = self.coordinates(rank)
        return here.dp % (self.data // self.replicas) * self.context + here.cp

    def state_replica(self, rank: int, sharded: bool) -> tuple[int, ...]:
        """Identify the replica of a stage's state that a rank stores, or stores a shard of."""
        here = self.coordinates(rank)
        # Unsharded, every data and context index has a replica.
        return (here.dp // (self.data // self.replicas),) if sharded else (here.dp, here.cp)

    def state_replicas(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that store the same shard of the state as ``rank``, one per replica."""
        index = self.state_shard(rank)
        return tuple(r for r in self.group(rank, "dp") if self.state_shard(r) == index)

    def tensor_subgroup(self, rank: int, count: int) -> tuple[int, ...]:
        """Return the ``count`` neighbouring ranks of the tensor group that include ``rank``."""
        group = self.group(rank, "tp")
        first = self.coordinates(rank).tp // count * count
        return group[first : first + count]

    def stage_rank(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage: ranks in order, repeated; for zbv in order, then in reverse."""
        round_, index = divmod(stage, self.pipeline)
        return self.pipeline - 1 - index if self.parallel.schedule == "zbv" and round_ % 2 else index

    def stages_of(self, pipeline_rank: int) -> list[int]:
        return [stage for stage in range(self.parallel.stages) if self.stage_rank(stage) == pipeline_rank]

    def remote_neighbour_stages(self, pipeline_rank: int) -> list[tuple[int, list[int]]]:
        """Return the stages of a pipeline rank, each with the stages on other ranks that it communicates with."""
        # The two stages at the turning point of zbv's V are on the same rank and send each other no messages.
        return [
            (stage, [other for other in (stage - 1, stage + 1) if self._is_remote(other, pipeline_rank)])
            for stage in self.stages_of(pipeline_rank)
        ]

    def _is_remote(self, stage: int, pipeline_rank: int) -> bool:
        return 0 <= stage < self.parallel.stages and self.stage_rank(stage) != pipeline_rank

    def embedding_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the first and last stage in the pipeline of ``rank``; one if they are the same."""
        group = self.group(rank, "pp")
        return tuple(sorted({group[0], group[self.stage_rank(self.parallel.stages - 1)]}))

    def rows(self, rank: int, global_batch: int) -> range:
        """Return the sequences of a global batch that a rank's data-parallel index computes."""
        count = global_batch // self.data
        first = self.coordinates(rank).dp * count
        return range(first, first + count)

    def spans(self, rank: int, length: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of a sequence that a rank computes, as (start, stop) pairs."""
        if self.context == 1:
            return ((0, length),)
        # Context-parallel rank i has the i-th and the i-th last chunk: with a causal mask, every such pair costs the
        # same.
        index, chunk = self.coordinates(rank).cp, length // (2 * self.context)
        last = 2 * self.context - 1 - index
        return ((index * chunk, (index + 1) * chunk), (last * chunk, (last + 1) * chunk))


def chunk_rows(rows: int, index: int, count: int) -> range:
    """Return the rows of a shard; FSDP2 shards them like torch.chunk."""
    size = -(-rows // count)
    return range(min(index * size, rows), min((index + 1) * size, rows))


_ADAMW = AdamWConfig()


@dataclass(frozen=True)
class StepShape:
    """A training step of a model in a parallel layout."""

    model: ModelConfig
    parallel: ParallelConfig
    world: int
    sequence: int  # tokens
    global_batch: int  # sequences per step
    micro_batch: int = 1  # sequences per forward pass
    mode: str = "fp32"
    policy: str = "none"  # activation checkpointing, as in the recipe
    budget: float | None = None  # bytes that a rank may save for backward, if the policy is "budget"
    isolated: bool = False  # attention within documents only
    component_bytes: int = 0  # that training components keep for each stored parameter element
    optimizer: OptimizerConfig = _ADAMW

    @classmethod
    def of(cls, recipe: Recipe, world: int) -> "StepShape":
        """Take the step shape from a recipe that is valid for ``world`` processes."""
        memory = recipe.memory
        return cls(
            recipe.model,
            recipe.parallel,
            world,
            recipe.data.sequence_length,
            recipe.batch.global_batch,
            recipe.batch.micro_batch,
            recipe.precision.mode,
            memory.activation_checkpointing,
            None if memory.budget_gib is None else memory.budget_gib * 2**30,
            recipe.data.isolate,
            recipe.component_bytes,
            recipe.optimizer,
        )

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.parallel, self.world)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step on a data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.layout.data)

    @cached_property
    def shards(self) -> int:
        """Ranks that optimizer state (and more, depending on the ZeRO stage) is sharded over; 1 if it is not."""
        return self.layout.shards if self.layout.zero else 1

    @property
    def sharded(self) -> bool:
        return self.shards > 1

    def shard_rows(self, rank: int, rows: int) -> range:
        """Return those of the rows of a parameter that a rank stores."""
        return chunk_rows(rows, self.layout.state_shard(rank) if self.sharded else 0, self.shards)

    @property
    def gathers_ends_apart(self) -> bool:
        """True if embedding and head are gathered each when it runs, and freed after it (ZeRO 3)."""
        # In a pipeline they are on different stages, and a tied matrix is needed from the start to the end of a pass.
        return self.sharded and self.layout.zero == 3 and self.layout.pipeline == 1 and not self.model.tie_embeddings

    @property
    def virtual(self) -> int:
        """Stages per pipeline rank."""
        return self.parallel.stages_per_rank

    def first_rank(self, pipeline_rank: int) -> int:
        """Return the first rank with a pipeline rank; the others with it need no more memory."""
        return pipeline_rank * (self.world // self.layout.pipeline)
