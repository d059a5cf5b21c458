"""Peak memory of a pipeline rank, of any number of layers, and the bytes of its weights, gradients and optimizer state.

    step shape, rank, its model shards -> rows of each parameter -> StateBytes
    step shape, pipeline rank, layers -> state + transient memory (transient_memory.py) -> RankBytes

The state of a rank is a linear function of its number of layers, so two counts determine it for any number.

State is counted parameter by parameter, from the shapes that the model is built with (``parameter_layouts``). If
everything divides evenly, these are the numbers of Rajbhandari et al. 2020 (ZeRO, section 5). Psi is the number of
parameters of a rank's model shard: those of the model / (T P) with T tensor-parallel and P pipeline ranks. N ranks
share the state. p, g and m are bytes per parameter, per gradient and of the optimizer's state (m Psi is a sum over the
parameters, each of which may have other states):

    ZeRO    parameters between steps   within a step   gradients: accumulating   at the optimizer's step   state
    0       p Psi                      p Psi           g Psi                     g Psi                     m Psi
    1       p Psi / N                  p Psi (1 + 1/N) g Psi                     g Psi / N                 m Psi / N
    2       p Psi / N                  p Psi (1 + 1/N) g Psi / N                 g Psi / N                 m Psi / N
    3       p Psi / N                  p Psi / N (*)   g Psi / N                 g Psi / N                 m Psi / N

Otherwise actual storage is counted:

- Norm weights are replicated on all tensor-parallel ranks, and kv heads on several if there are fewer kv heads than
  such ranks. Shards of the vocabulary differ by at most one row. A tied embedding is stored on first and last pipeline
  stage.
- FSDP2 shards by rows and pads each parameter to N equal shards of ceil(rows / N) rows, for parameters and gradients,
  sharded and gathered. Optimizer state has no padding. There is a step counter per parameter in addition.
- Within a step the shards stay in memory in addition to the gathered copy, at ZeRO 1 and 2 too. (In the paper ZeRO 1
  and 2 always keep one complete copy, and the shards are fp32 master weights in addition to a bf16 copy.)
- (*) At ZeRO 3, norm and head stay gathered from their forward to the end of their backward pass, and blocks are
  gathered one at a time, while they run; so is the embedding, whose backward pass needs no weights. In a pipeline, and
  if it is tied to the head, it stays gathered until its own backward pass.
- With one micro-batch per step nothing is accumulated; ZeRO 1 then reduces each gradient as soon as it is computed,
  like ZeRO 2.
- A pipeline accumulates unsharded gradients until its last micro-batch at every ZeRO stage. Schedules with several
  stages per rank gather all parameters of a pipeline stage when it is first needed, at ZeRO 3 too.

The buffers of FSDP2's collectives during a pass are not counted here. Each has the size of the parameters or gradients
that it gathers or reduces: those of a block, or of embedding, norm and head, together or (ZeRO 3) of the embedding
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hlat.model import ModelShard, parameter_layouts
from hlat.optim import COUNTER_BYTES, optimizer_spec
from hlat.parallel.layout import StepShape, chunk_rows
from hlat.parallel.stages.transient_memory import transient_bytes
from hlat.parallel.stages.transient_sizes import ACCELERATOR, ById, EagerKernels
from hlat.precision import MODES

_GATHERED_STAGES = 3  # stages of a rank whose parameters torch's pipelines gather at a time (ZeRO 1)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state that a rank stores."""

    parameters: int  # between steps
    parameters_within_step: int  # maximum after a forward or backward pass of a micro-batch, gathered copies included
    gradients_accumulating: int  # after a backward pass of a micro-batch, maximum over the step
    gradients: int  # at the optimizer's step
    optimizer: int  # from the first step on
    components: int = 0  # training components, such as an average of the weights; without padding, like moments


def state_bytes_of_shards(
    step: StepShape,
    rank: int,
    shards: Sequence[ModelShard],
    parameter_bytes: int = 4,
    gradient_bytes: int = 4,
) -> StateBytes:
    """Count the bytes of state of a rank with these model shards, one per stage.

    The count is exact, except for two upper bounds if a sharded pipeline rank has several stages, where the number
    depends on the order of the schedule. ``parameters_within_step``: of more than three stages, three are gathered at a
    time (here the largest are counted). ``gradients_accumulating``: with fewer than two rounds of micro-batches (2 x
    pipeline), the gradients of one stage are reduced before the next stage has any.
    """
    stages = _stage_elements(step, rank, shards)
    stored = sum(stage.stored for stage in stages)
    unsharded = sum(stage.unsharded for stage in stages)
    accumulates_unsharded = (
        not step.sharded or step.layout.pipeline > 1 or (step.layout.zero == 1 and step.micro_batches > 1)
    )
    return StateBytes(
        parameters=stored * parameter_bytes,
        parameters_within_step=(stored + _gathered(stages, step)) * parameter_bytes,
        gradients_accumulating=(unsharded if accumulates_unsharded else stored) * gradient_bytes,
        gradients=stored * gradient_bytes,
        optimizer=sum(stage.state_bytes for stage in stages),
        components=sum(stage.unpadded for stage in stages) * step.component_bytes,
    )


def gathered_ends(step: StepShape, rank: int, shards: Sequence[ModelShard]) -> int:
    """Count the elements of embedding, norm and head in gathered copies, which a rank gathers once in a micro-batch."""
    return sum(stage.ends for stage in _stage_elements(step, rank, shards))


def _stage_elements(step: StepShape, rank: int, shards: Sequence[ModelShard]) -> "list[_StageElements]":
    index = step.layout.state_shard(rank) if step.sharded else 0
    spec = optimizer_spec(step.optimizer, step.mode)
    state = spec.state_bytes(True), spec.state_bytes(False)
    return [_elements(ById(step.model), shard, index, step.shards, state) for shard in shards]


@dataclass(frozen=True)
class _StageElements:
    """Numbers of elements of one model shard on a rank."""

    unsharded: int  # without data parallelism
    stored: int  # between steps, padding included; the same as ``unsharded`` if nothing is sharded
    ends: int  # outside of blocks (embedding, norm, head) in a gathered copy, padding included
    embedding: int  # those of ``ends`` in the embedding
    unpadded: int  # stored between steps, without padding
    state_bytes: int  # of optimizer state


@lru_cache(maxsize=4096)
def _elements(model: ById, shard: ModelShard, index: int, count: int, state: tuple[int, int]) -> _StageElements:
    layouts = parameter_layouts(model.model, shard)
    widths = {name: prod(layout.columns) for name, layout in layouts.items()}
    # The storage of every shard has the size of the first one, which is the largest.
    padded = {name: len(chunk_rows(layout.rows, 0, count)) * widths[name] for name, layout in layouts.items()}
    own = {name: len(chunk_rows(layout.rows, index, count)) * widths[name] for name, layout in layouts.items()}
    return _StageElements(
        unsharded=sum(layout.rows * widths[name] for name, layout in layouts.items()),
        stored=sum(padded.values()),
        ends=count * sum(size for name, size in padded.items() if not name.startswith("layers.")),
        embedding=count * sum(size for name, size in padded.items() if name.startswith("embedding.")),
        unpadded=sum(own.values()),
        state_bytes=sum(size * state[not layouts[name].is_hidden_matrix] + COUNTER_BYTES for name, size in own.items()),
    )


def _gathered(stages: Sequence[_StageElements], step: StepShape) -> int:
    """Elements of gathered copies that stay in memory after a pass."""
    if not step.sharded:
        return 0
    if step.layout.zero == 3:
        freed = sum(stage.embedding for stage in stages) if step.gathers_ends_apart else 0
        return sum(stage.ends for stage in stages) - freed
    return step.shards * sum(sorted((stage.stored for stage in stages), reverse=True)[:_GATHERED_STAGES])


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank at the instant of peak memory."""

    parameters: float  # with their gathered copies
    optimizer: float  # moments and step counters, and state of training components
    transient: dict[str, float]  # by name (``transient_bytes``)

    @property
    def total(self) -> float:
        return self.parameters + self.optimizer + sum(self.transient.values())


def peak_rank_bytes(
    step: StepShape,
    pipeline_rank: int,
    sizes: tuple[float, ...],  # layers of each stage of the rank
    state: tuple[float, float, float],  # parameters with gathered copies, gradients, optimizer and components
    kernels: EagerKernels = ACCELERATOR,
) -> RankBytes:
    """Compute the bytes of a rank at the instant of a step at which it needs most."""
    parameters, gradients, optimizer = state
    found = transient_bytes(step, pipeline_rank, sizes, has_embedding_and_head(step, pipeline_rank), gradients, kernels)
    peak = max(found, key=lambda instant: sum(instant.values()))
    transient = {name: size for name, size in peak.items() if name != "parameters"}
    return RankBytes(parameters + peak.get("parameters", 0.0), optimizer, transient)


def rank_bytes(
    step: StepShape, pipeline_rank: int, sizes: tuple[float, ...], kernels: EagerKernels = ACCELERATOR
) -> RankBytes:
    """Compute the peak bytes of a rank whose stages have ``sizes`` layers each, at least one."""
    # State is a linear function of the layers: two counts determine it.
    few, more = _states(step, *has_embedding_and_head(step, pipeline_rank))
    extra = sum(sizes) / step.virtual - 1
    parameters, gradients, optimizer = (
        first + extra * (second - first) for first, second in zip(few, more, strict=True)
    )
    return peak_rank_bytes(step, pipeline_rank, sizes, (parameters, gradients, optimizer), kernels)


def has_embedding_and_head(step: StepShape, pipeline_rank: int) -> tuple[bool, bool]:
    """Return (True if a pipeline rank has the embedding, True if it has the head)."""
    layout = step.layout
    return pipeline_rank == 0, pipeline_rank == layout.stage_rank(step.parallel.stages - 1)


def state_sizes(step: StepShape, rank: int, shards: Sequence[ModelShard]) -> tuple[float, float, float]:
    """Count the ``state`` of ``peak_rank_bytes``, in the dtypes of the precision mode."""
    mode = MODES[step.mode]
    state = state_bytes_of_shards(step, rank, shards, mode.weights.itemsize, mode.gradients.itemsize)
    # FSDP2 gathers parameters in the compute dtype.
    gathered = (state.parameters_within_step - state.parameters) * mode.compute.itemsize / mode.weights.itemsize
    kept = state.optimizer + state.components
    return state.parameters + gathered, float(state.gradients_accumulating), float(kept)


@lru_cache(maxsize=1024)
def _states(
    step: StepShape, embedding: bool, head: bool
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """State of a rank with one layer per stage, and with two."""

    def state(layers: int) -> tuple[float, float, float]:
        last = step.virtual - 1
        shards = [
            ModelShard(0, step.layout.tensor, range(layers), embedding and index == 0, head and index == last)
            for index in range(step.virtual)
        ]
        return state_sizes(step, 0, shards)

    return state(1), state(2)
