"""How many bytes of parameters, gradients and optimizer state a rank holds, and when.

    cut, rank, the parts that it builds -> rows of each parameter -> bytes at five instants of a step

Counted from the shapes that the model itself is built from (``parameter_layouts``), parameter by parameter. Where
everything divides evenly, with Psi parameters of the model on a rank's share (those of the model / (T P) with T tensor-
parallel and P pipeline ranks), N ranks over which a replica of the state is sharded, and p, g, m bytes per parameter,
gradient and its moments, it is the textbook's count (Rajbhandari et al. 2020, ZeRO, section 5):

    stage   parameters between steps   within a step   gradients: accumulating   at the optimizer's step   moments
    0       p Psi                      p Psi           g Psi                     g Psi                     m Psi
    1       p Psi / N                  p Psi (1 + 1/N) g Psi                     g Psi / N                 m Psi / N
    2       p Psi / N                  p Psi (1 + 1/N) g Psi / N                 g Psi / N                 m Psi / N
    3       p Psi / N                  p Psi / N (*)   g Psi / N                 g Psi / N                 m Psi / N

and where not, what storage really is:

- Norm weights, and kv heads of which there are fewer than tensor-parallel ranks, are whole on each of these ranks; the
  vocabulary's rows are as even as can be; a tied embedding is held at both ends of a pipeline.
- FSDP2 shards by rows and pads each parameter to N equal shards of ceil(rows / N), in parameters and gradients, sharded
  and gathered. Moments have no padding. AdamW keeps a counter per parameter besides.
- Within a step the shards stay beside the gathered copy, which is another tensor, at stages 1 and 2 too. (In the paper
  stages 1 and 2 keep one whole copy all the time, and the shards are fp32 masters beside a bf16 copy.)
- (*) At stage 3 what is not in a block (embedding, norm, head) stays gathered from its forward to the end of its
  backward pass. Of the blocks, one is gathered at a time, while it is at work.
- A step of one micro-batch accumulates nothing, and stage 1 then sends a gradient as soon as it is known, as stage 2.
- A pipeline adds up whole gradients until its last micro-batch at every stage. Schedules with several stages per rank
  gather a stage as a whole when it is first needed, at stage 3 too.

Not counted are the buffers of FSDP2's collectives while a pass runs, each as large as the block (or what is not in a
block) that it gathers or reduces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hlat.model import ModelShard
from hlat.model.derived import RowLayout, parameter_layouts
from hlat.parallel.stages.step_shape import StepShape

_COUNTER_BYTES = 4  # AdamW's step, a scalar in fp32 per parameter
_GATHERED_STAGES = 3  # torch's pipelines gather the parameters of so many of a rank's stages at a time (ZeRO 1)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank holds.

    Attributes:
        parameters: between steps.
        parameters_within_step: the most that stay after a forward or backward pass of a micro-batch.
        gradients_accumulating: the most that stay after a backward pass of a micro-batch.
        gradients: when the optimizer steps.
        optimizer: its state, from the first step on.
    """

    parameters: int
    parameters_within_step: int
    gradients_accumulating: int
    gradients: int
    optimizer: int


def state_bytes_of_shards(
    step: StepShape,
    rank: int,
    parts: Sequence[ModelShard],
    parameter_bytes: int = 4,
    gradient_bytes: int = 4,
    moment_bytes: int = 8,
) -> StateBytes:
    """Bytes of state on a rank that builds these parts of a model.

    Exact, except that two numbers are upper bounds where a sharded pipeline rank has several stages, since they depend
    on the order in which the schedule takes them: ``parameters_within_step`` with more than three stages, of which
    three are gathered at a time (here the largest); ``gradients_accumulating`` with less than two rounds
    of micro-batches (2 x pipeline), where one stage's gradients are reduced before the next stage has any.

    Args:
        cut: the step, and the layout of all ranks.
        rank: which of them.
        parts: one per stage.
        parameter_bytes, gradient_bytes: per element.
        moment_bytes: both moments of an element together.
    """
    shards = step.layout.state_shards(rank) if step.sharded else (rank,)
    stages = [_StageElements.of(parameter_layouts(step.model, part), shards.index(rank), len(shards)) for part in parts]
    held = sum(stage.held for stage in stages)
    whole = sum(stage.whole for stage in stages)
    keeps_whole = not step.sharded or step.layout.pipeline > 1 or (step.layout.zero == 1 and step.micro_batches > 1)
    return StateBytes(
        parameters=held * parameter_bytes,
        parameters_within_step=(held + _gathered(stages, step)) * parameter_bytes,
        gradients_accumulating=(whole if keeps_whole else held) * gradient_bytes,
        gradients=held * gradient_bytes,
        optimizer=sum(stage.rows * moment_bytes + stage.count * _COUNTER_BYTES for stage in stages),
    )


@dataclass(frozen=True)
class _StageElements:
    """Elements of one part of a model on a rank.

    Attributes:
        whole: without data parallelism.
        held: of what it stores between steps, padding included; the same as ``whole`` where nothing is sharded.
        rows: of what it stores, without padding.
        gathered, ends: of a gathered copy, padding included; all of it, and what of it is not in a block.
        count: number of parameters.
    """

    whole: int
    held: int
    rows: int
    gathered: int
    ends: int
    count: int

    @classmethod
    def of(cls, layouts: dict[str, RowLayout], index: int, count: int) -> "_StageElements":
        """The shard of this index, of ``count``."""
        sizes = {name: _Shards(one.rows, prod(one.columns), count) for name, one in layouts.items()}
        return cls(
            whole=sum(size.rows * size.columns for size in sizes.values()),
            held=sum(size.padded for size in sizes.values()),
            rows=sum(size.of(index) for size in sizes.values()),
            gathered=sum(size.padded * count for size in sizes.values()),
            ends=sum(size.padded * count for name, size in sizes.items() if not name.startswith("layers.")),
            count=len(sizes),
        )


@dataclass(frozen=True)
class _Shards:
    """Elements of one parameter cut by rows into ``count`` shards, as torch.chunk does it."""

    rows: int
    columns: int
    count: int

    @property
    def padded(self) -> int:
        """The storage of each shard: of the first, which is the largest."""
        return -(-self.rows // self.count) * self.columns

    def of(self, index: int) -> int:
        """A shard without padding."""
        size = -(-self.rows // self.count)
        return max(0, min(size, self.rows - index * size)) * self.columns


def _gathered(stages: Sequence[_StageElements], step: StepShape) -> int:
    """Elements of gathered copies that stay after a pass."""
    if not step.sharded:
        return 0
    if step.layout.zero == 3:
        return sum(stage.ends for stage in stages)
    return sum(sorted((stage.gathered for stage in stages), reverse=True)[:_GATHERED_STAGES])
