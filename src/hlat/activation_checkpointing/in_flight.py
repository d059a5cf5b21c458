"""How many forward passes wait for their backward pass on a pipeline rank.

    schedule, rank, micro-batches -> the most forward passes, over all stages of the rank, whose graphs are alive

The schedules are those of ``torch.distributed.pipelining``; the orders of passes they lay out are what the tests count.
"""

from hlat.config.sections import ParallelConfig


def passes_in_flight(parallel: ParallelConfig, pipeline_rank: int, micro_batches: int) -> int:
    """The most passes of a rank's stages that are alive at once; where backward is split, until the weights' part."""
    ranks, stages = parallel.pipeline, parallel.stages_per_rank
    everything = micro_batches * stages
    if ranks == 1:
        return 1
    if parallel.schedule == "gpipe":
        return everything
    if parallel.schedule == "1f1b":
        return min(everything, ranks - pipeline_rank)  # Narayanan et al. 2021, section 2.2
    if parallel.schedule == "zbv":
        return min(everything, 2 * ranks)  # Qi et al. 2024: the memory of 1f1b, in halves of a rank's layers
    per_round = micro_batches // max(1, micro_batches // ranks)
    earlier = (stages - 1) * per_round
    if parallel.schedule == "interleaved-1f1b":
        return min(everything, earlier + 2 * (ranks - 1 - pipeline_rank) + 1)
    # interleaved-zero-bubble: fewer before the first backward pass, and weights' gradients rank passes later.
    return min(everything, earlier + ranks)
