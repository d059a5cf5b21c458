"""Processes of the preflight, one per rank: they import torch, measure, join each other and measure together.

this process --questions, a line of JSON each--> ``rank_main`` --facts, a line of JSON each--> this process
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.preflight.ranks.plan import plan_needs
    from hlat.launch.preflight.ranks.processes import RankProcesses, new_secret, rank_command

__getattr__ = lazily(__name__, {"plan": ("plan_needs",), "processes": ("RankProcesses", "new_secret", "rank_command")})

__all__ = ["RankProcesses", "new_secret", "plan_needs", "rank_command"]
