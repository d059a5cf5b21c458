"""Peak memory of a pipeline rank, for any number of layers.

    step shape, pipeline rank, layers -> state (state_bytes.py) + transient memory (memory) -> RankBytes

The state of a rank is a linear function of its number of layers, so two counts determine it for any number.
"""

from dataclasses import dataclass
from functools import lru_cache

from hlat.model import ModelShard
from hlat.parallel.stages.eager_kernels import ACCELERATOR, EagerKernels
from hlat.parallel.stages.memory.transient_memory import transient_bytes
from hlat.parallel.stages.state_bytes import StateBytes, state_bytes_of_shards
from hlat.parallel.stages.step_shape import StepShape
from hlat.precision import MODES


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank at the instant of peak memory.

    Attributes:
        parameters: parameters and their gathered copies.
        optimizer: state of the optimizer (moments and step counters) and of training components.
        transient: transient memory, by name (``transient_bytes``).
    """

    parameters: float
    optimizer: float
    transient: dict[str, float]

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.parameters + self.optimizer + sum(self.transient.values())


def peak_rank_bytes(
    step: StepShape,
    pipeline_rank: int,
    sizes: tuple[float, ...],
    state: tuple[float, float, float],
    kernels: EagerKernels = ACCELERATOR,
) -> RankBytes:
    """Compute the bytes of a rank at the instant of a step at which it needs most.

    Args:
        step: model, layout and batch of a training step.
        pipeline_rank: index on the pipeline axis.
        sizes: layers of each stage of the rank.
        state: bytes of parameters with their gathered copies, of accumulated gradients, and of the optimizer and
            training components.
        kernels: eager kernels of the device.
    """
    parameters, gradients, optimizer = state
    found = transient_bytes(step, pipeline_rank, sizes, has_embedding_and_head(step, pipeline_rank), gradients, kernels)
    peak = max(found, key=lambda instant: sum(instant.values()))
    transient = {name: size for name, size in peak.items() if name != "parameters"}
    return RankBytes(parameters + peak.get("parameters", 0.0), optimizer, transient)


def rank_bytes(
    step: StepShape, pipeline_rank: int, sizes: tuple[float, ...], kernels: EagerKernels = ACCELERATOR
) -> RankBytes:
    """Compute the peak bytes of a rank whose stages have ``sizes`` layers each, at least one."""
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


def state_sizes(step: StepShape, state: StateBytes) -> tuple[float, float, float]:
    """Convert state to the ``state`` of ``peak_rank_bytes``. FSDP2 gathers parameters in the compute dtype."""
    mode = MODES[step.mode]
    gathered = (state.parameters_within_step - state.parameters) * mode.compute.itemsize / mode.weights.itemsize
    kept = state.optimizer + state.components
    return state.parameters + gathered, float(state.gradients_accumulating), float(kept)


def state_bytes_in_mode(step: StepShape, rank: int, shards: list[ModelShard]) -> StateBytes:
    """Compute the bytes of state of a rank in the dtypes of the precision mode."""
    mode = MODES[step.mode]
    return state_bytes_of_shards(
        step,
        rank,
        shards,
        parameter_bytes=mode.weights.itemsize,
        gradient_bytes=mode.gradients.itemsize,
    )


@lru_cache(maxsize=1024)
def _states(
    step: StepShape, embedding: bool, head: bool
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Compute the state of a rank with one layer per stage, and with two."""

    def state(layers: int) -> tuple[float, float, float]:
        last = step.virtual - 1
        shards = [
            ModelShard(0, step.layout.tensor, range(layers), embedding and index == 0, head and index == last)
            for index in range(step.virtual)
        ]
        return state_sizes(step, state_bytes_in_mode(step, 0, shards))

    return state(1), state(2)
