"""Step shape: model, layout and batch of a training step, which decide the layers and the memory of every rank.

    recipe, world size | a candidate layout of the planner -> StepShape -> layers of stages, bytes of ranks

Nothing in it is measured or depends on the device, so that every rank, a rehearsal and a plan of the same recipe
compute the same stages.
"""

from dataclasses import dataclass
from functools import cached_property

from hlat.config import AdamWConfig, ModelConfig, OptimizerConfig, ParallelConfig, Recipe
from hlat.parallel.mesh.mesh_layout import Layout

_ADAMW = AdamWConfig()


@dataclass(frozen=True)
class StepShape:
    """A training step of a model in a parallel layout.

    Attributes:
        model: model section of the recipe.
        parallel: parallel section of the recipe.
        world: number of processes.
        sequence: tokens per sequence.
        global_batch, micro_batch: sequences per step, and per forward pass.
        mode: precision mode.
        policy: activation checkpointing policy, as in the recipe.
        budget: bytes that a rank may save for backward, if the policy is "budget".
        isolated: True for attention within documents only.
        component_bytes: bytes that training components keep for each stored parameter element.
        optimizer: optimizer section of the recipe.
    """

    model: ModelConfig
    parallel: ParallelConfig
    world: int
    sequence: int
    global_batch: int
    micro_batch: int = 1
    mode: str = "fp32"
    policy: str = "none"
    budget: float | None = None
    isolated: bool = False
    component_bytes: int = 0
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
        """Parallel layout of all ranks."""
        return Layout.of(self.parallel, self.world)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step on a data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.layout.data)

    @cached_property
    def shards(self) -> int:
        """Number of ranks that state may be sharded over: those of a replica, context-parallel ranks included."""
        return self.layout.data // self.layout.replicas * self.layout.context

    @property
    def sharded(self) -> bool:
        """True if optimizer state (and more, depending on the ZeRO stage) is sharded."""
        return self.layout.zero > 0 and self.shards > 1

    @property
    def gathers_ends_apart(self) -> bool:
        """True if embedding and head are gathered each when it runs, and freed after it (ZeRO 3).

        In a pipeline they are on different stages, and a tied matrix is needed from the start to the end of a pass.
        """
        return self.sharded and self.layout.zero == 3 and self.layout.pipeline == 1 and not self.model.tie_embeddings

    @property
    def virtual(self) -> int:
        """Number of stages per pipeline rank."""
        return self.parallel.stages_per_rank

    def first_rank(self, pipeline_rank: int) -> int:
        """Return the first rank with a pipeline rank; the others with it need no more memory."""
        return pipeline_rank * (self.world // self.layout.pipeline)
