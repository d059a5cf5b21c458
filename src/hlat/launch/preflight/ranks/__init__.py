"""Processes of the preflight, one per rank: they import torch, measure, join each other and measure together.

this process --questions, a line of JSON each--> ``rank_main`` --facts, a line of JSON each--> this process
"""

from hlat.launch.preflight.ranks.processes import RankProcesses, new_secret, rank_command

__all__ = ["RankProcesses", "new_secret", "rank_command"]
