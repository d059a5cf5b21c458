"""Bytes of memory that a rank needs in a candidate layout."""

from hlat.planner.memory.rank_memory import (
    RankMemory,
    device_overhead,
    estimate_rank_memory,
    has_fused_kernels,
    rank_memory,
    ranks_of_interest,
)

__all__ = [
    "RankMemory",
    "device_overhead",
    "estimate_rank_memory",
    "has_fused_kernels",
    "rank_memory",
    "ranks_of_interest",
]
