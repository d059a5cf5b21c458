"""Number of forward passes in flight (waiting for their backward pass) on a pipeline rank.

    schedule, rank, micro-batches -> maximum number of passes with saved activations, over all stages of the rank

The schedules are those of ``torch.distributed.pipelining``; tests compare the numbers with torch's order of passes.
"""

from hlat.config import ParallelConfig


def passes_in_flight(parallel: ParallelConfig, pipeline_rank: int, micro_batches: int) -> int:
    """Return the maximum number of passes of a rank in flight; a split backward pass ends with its weight gradients."""
    ranks, stages = parallel.pipeline, parallel.stages_per_rank
    total = micro_batches * stages
    if ranks == 1:
        return 1
    if parallel.schedule == "gpipe":
        return total
    if parallel.schedule == "1f1b":
        return min(total, ranks - pipeline_rank)  # Narayanan et al. 2021, section 2.2
    if parallel.schedule == "zbv":
        return min(total, 2 * ranks)  # Qi et al. 2024: the memory of 1f1b; each stage has half of a rank's layers
    per_round = micro_batches // max(1, micro_batches // ranks)
    earlier = (stages - 1) * per_round
    if parallel.schedule == "interleaved-1f1b":
        return min(total, earlier + 2 * (ranks - 1 - pipeline_rank) + 1)
    # interleaved-zero-bubble: fewer passes before the first backward pass, weight gradients `rank` passes later.
    return min(total, earlier + ranks)
