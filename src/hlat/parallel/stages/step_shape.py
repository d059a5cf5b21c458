"""A training step and how it is cut: everything that decides which layers a rank has and how many bytes it needs.

    recipe, world | a layout that a plan considers -> Cut -> stages (stages.py), bytes (moments.py)

Nothing of it is measured and nothing depends on the device, so that every rank, a rehearsal and a plan of the same
recipe find the same stages.
"""

from dataclasses import dataclass
from functools import cached_property

from hlat.config import Recipe
from hlat.config.sections import ModelConfig, ParallelConfig
from hlat.parallel.mesh import Layout


@dataclass(frozen=True)
class StepShape:
    """One step of a model in a layout.

    Attributes:
        model: in numbers.
        parallel: the section of the recipe.
        world: processes.
        sequence: tokens per sequence.
        global_batch, micro_batch: sequences per step and per pass.
        mode: of precision.
        policy: of activation checkpointing, as in the recipe.
        budget: bytes that a rank may keep for backward, where the policy is "budget".
        isolated: whether documents see only themselves.
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

    @classmethod
    def of(cls, recipe: Recipe, world: int) -> "StepShape":
        """The step of a recipe that is valid for ``world`` processes."""
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
        )

    @cached_property
    def layout(self) -> Layout:
        """Who does what."""
        return Layout.of(self.parallel, self.world)

    @cached_property
    def micro_batches(self) -> int:
        """Passes of a step, on a data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.layout.data)

    @cached_property
    def shards(self) -> int:
        """Ranks that the state may be sharded over: those of one replica, context-parallel ranks included."""
        return self.layout.data // self.layout.replicas * self.layout.context

    @property
    def sharded(self) -> bool:
        """Whether optimizer state, and perhaps more, is sharded."""
        return self.layout.zero > 0 and self.shards > 1

    @property
    def virtual(self) -> int:
        """Stages per pipeline rank."""
        return self.parallel.stages_per_rank

    def first_rank(self, pipeline_rank: int) -> int:
        """The first of the ranks at a place of the pipeline; the others there have no more than it."""
        return pipeline_rank * (self.world // self.layout.pipeline)
