"""Bytes that a rank of a pipeline needs at the moment of a step at which it needs most, for any number of layers.

    cut, pipeline rank, layers -> state (footprint.py) + what comes and goes (moments.py) -> RankBytes

A rank has state in proportion to its layers, so that two counts give it for any number of them.
"""

from dataclasses import dataclass
from functools import lru_cache

from hlat.model import ModelShard
from hlat.parallel.stages.state_bytes import StateBytes, state_bytes_of_shards
from hlat.parallel.stages.step_shape import StepShape
from hlat.parallel.stages.transient_memory import transient_bytes
from hlat.precision import MODES


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank when it has most.

    Attributes:
        parameters: and gathered copies of them.
        optimizer: AdamW's moments and counters.
        transient: what comes and goes, by name (``moments``).
    """

    parameters: float
    optimizer: float
    transient: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes in all."""
        return self.parameters + self.optimizer + sum(self.transient.values())


def peak_rank_bytes(
    step: StepShape,
    pipeline_rank: int,
    sizes: tuple[float, ...],
    state: tuple[float, float, float],
    on_cpu: bool = False,
) -> RankBytes:
    """The moment at which a rank needs most.

    Args:
        sizes: layers of each stage of the rank.
        state: bytes of parameters with their gathered copies, of gradients as they are added up, and of the optimizer.
        on_cpu: as ``moments`` takes it.
    """
    parameters, gradients, optimizer = state
    found = transient_bytes(step, pipeline_rank, sizes, has_embedding_and_head(step, pipeline_rank), gradients, on_cpu)
    return RankBytes(parameters, optimizer, max(found, key=lambda moment: sum(moment.values())))


def rank_bytes(step: StepShape, pipeline_rank: int, sizes: tuple[float, ...]) -> RankBytes:
    """Bytes of a rank if its stages have so many layers each, at least one."""
    few, more = _states(step, *has_embedding_and_head(step, pipeline_rank))
    share = sum(sizes) / step.virtual - 1
    parameters, gradients, optimizer = (one + share * (two - one) for one, two in zip(few, more, strict=True))
    return peak_rank_bytes(step, pipeline_rank, sizes, (parameters, gradients, optimizer))


def has_embedding_and_head(step: StepShape, pipeline_rank: int) -> tuple[bool, bool]:
    """Whether a pipeline rank has the embedding, and whether it has the head."""
    layout = step.layout
    return pipeline_rank == 0, pipeline_rank == layout.stage_rank(step.parallel.stages - 1)


def state_sizes(step: StepShape, state: StateBytes) -> tuple[float, float, float]:
    """State as ``peak_rank_bytes`` takes it: FSDP2 gathers parameters in the dtype that is computed in."""
    mode = MODES[step.mode]
    gathered = (state.parameters_within_step - state.parameters) * mode.compute.itemsize / mode.weights.itemsize
    return state.parameters + gathered, float(state.gradients_accumulating), float(state.optimizer)


def state_bytes_in_mode(step: StepShape, rank: int, parts: list[ModelShard]) -> StateBytes:
    """State in the dtypes of the mode of precision."""
    mode = MODES[step.mode]
    return state_bytes_of_shards(
        step,
        rank,
        parts,
        parameter_bytes=mode.weights.itemsize,
        gradient_bytes=mode.gradients.itemsize,
        moment_bytes=2 * mode.moments.itemsize + (mode.compensation.itemsize if mode.compensation else 0),
    )


@lru_cache(maxsize=1024)
def _states(
    step: StepShape, embedding: bool, head: bool
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """State of a rank with one layer per stage, and with two."""

    def state(layers: int) -> tuple[float, float, float]:
        last = step.virtual - 1
        parts = [
            ModelShard(0, step.layout.tensor, range(layers), embedding and index == 0, head and index == last)
            for index in range(step.virtual)
        ]
        return state_sizes(step, state_bytes_in_mode(step, 0, parts))

    return state(1), state(2)
