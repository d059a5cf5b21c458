"""Bytes that a rank needs in a candidate layout."""

from hlat.planner.memory.rank_memory import RankMemory, estimated_memory, fullest_ranks, rank_memory

__all__ = ["RankMemory", "estimated_memory", "fullest_ranks", "rank_memory"]
