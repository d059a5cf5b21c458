"""The parallel and memory sections: degrees of parallelism, and activation checkpointing.

    degrees x world -> one rank per process; a copy of the model takes tensor x pipeline x context of them

The data-parallel degree is what is left: world / (tensor * pipeline * context). Mesh axes from outermost to innermost
are pipeline, data, context, tensor. No field is fixed: a run may go on in another layout.
"""

from typing import Literal

from hlat.config.sections.base import Gibibytes, Positive, Section

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
ZERO_BUBBLE: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv")
INTERLEAVED: tuple[Schedule, ...] = ("interleaved-1f1b", "interleaved-zero-bubble")


def compile_obstacle(pipeline: int, schedule: Schedule) -> str:
    """Return the reason why the schedule of a layout keeps blocks from being compiled; empty if they can be."""
    return "takes the backward pass of a block apart" if pipeline > 1 and schedule in ZERO_BUBBLE else ""


def default_virtual_stages(schedule: Schedule) -> int:
    """Stages per pipeline rank if the recipe gives none: the fewest that the schedule works with."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


def resolved_virtual_stages(pipeline: int, schedule: Schedule, virtual_stages: int | None) -> int:
    """Stages per pipeline rank. Without a pipeline there is no schedule, and one stage unless the recipe gives more."""
    if virtual_stages is not None:
        return virtual_stages
    return default_virtual_stages(schedule) if pipeline > 1 else 1


class ParallelConfig(Section):
    """Degrees of parallelism. The data-parallel degree is the world size divided by their product."""

    tensor: Positive = 1
    """Tensor-parallel degree: ranks that share the heads and the inner columns of every layer."""
    sequence: bool = True
    """Sequence parallelism: shard activations between blocks over the tensor group; no effect at tensor 1."""
    gather_again: Literal["auto", "always", "never"] = "auto"
    """With sequence parallelism, gather the inputs of attention and feed-forward again in backward instead of keeping
    them. never keeps them; auto keeps them with zero-bubble schedules, and within the budget of memory.budget_gib."""
    pipeline: Positive = 1
    """Pipeline-parallel degree: ranks that the layers are cut over."""
    virtual_stages: Positive | None = None
    """Stages per pipeline rank; null means 1 for gpipe and 1f1b, 2 for the interleaved schedules and zbv."""
    schedule: Schedule = "1f1b"
    """Order of forward and backward passes in a pipeline; no effect at pipeline 1."""
    split: tuple[Positive, ...] | None = None
    """Layers of each stage, in order, as in [3, 2]; null: balanced, by the time of
    the slowest rank first, then by the memory of the fullest."""
    context: Positive = 1
    """Context-parallel degree: ranks that each sequence is cut over, in 2 * context chunks, zig-zag."""
    zero: Literal[0, 1, 2, 3] = 1
    """Sharded over data- and context-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    replicas: Positive = 1
    """Copies of the sharded state: sharded within each, replicated across them (hybrid sharding)."""

    @property
    def stages_per_rank(self) -> int:
        return resolved_virtual_stages(self.pipeline, self.schedule, self.virtual_stages)

    @property
    def shards_sequences(self) -> bool:
        """True if activations between blocks are sharded over a tensor group."""
        return self.sequence and self.tensor > 1

    @property
    def gathers_again(self) -> bool:
        # A split backward pass would keep what its first half has gathered until its second half.
        split = self.pipeline > 1 and self.schedule in ZERO_BUBBLE
        return self.shards_sequences and self.gather_again != "never" and not split

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @property
    def model_ranks(self) -> int:
        """Processes that work on the same sequences: those of one data-parallel rank."""
        return self.tensor * self.pipeline * self.context

    def describe(self, data: int | None = None) -> str:
        """Return the layout in words; ``data`` is the data-parallel degree, None leaves it open."""
        processes = f"N x {self.model_ranks}" if data is None else f"{data * self.model_ranks}"
        plural = "" if processes == "1" else "es"
        axes = f"pipeline {self.pipeline} x data {data or 'N'} x context {self.context} x tensor {self.tensor}"
        shards = None if data is None else data // self.replicas * self.context
        copies = f" in {self.replicas} replicas" if self.replicas > 1 else ""
        zero = "" if shards == 1 else f", ZeRO {self.zero}{copies}"  # with one shard there is nothing to share out
        return f"{processes} process{plural} = {axes}{zero}"


class MemoryConfig(Section):
    """Activation checkpointing: activations kept for backward, and recomputed."""

    activation_checkpointing: Literal["none", "selective", "full", "budget"] = "none"
    """none keeps all activations; selective recomputes core attention and the SwiGLU product in backward, as HLAT did;
    full keeps only the input of each block; budget recomputes the least that fits into memory.budget_gib."""
    budget_gib: Gibibytes | None = None
    """GiB that one rank may keep for backward, over all micro-batches that it has in flight; only with budget."""
