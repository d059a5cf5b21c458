"""Bytes of ranks whose stages are balanced as in a run."""

from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import StateBytes, rank_bytes, state_bytes_of_shards
from hlat.parallel.stages.stage_layers import rank_model_shards, stage_layer_counts


def state_bytes(step: StepShape, rank: int) -> StateBytes:
    return state_bytes_of_shards(step, rank, rank_model_shards(step, rank))


def peak_memory_rank(step: StepShape) -> int:
    """Return the pipeline rank with the highest peak memory; the first if several are equal."""
    needs = [rank_bytes(step, rank, sizes).total for rank, sizes in enumerate(stage_layer_counts(step))]
    return needs.index(max(needs))
