"""Dry run of the real program at full size without devices: memory, messages and FLOPs of any rank in one step."""

from hlat.rehearsal.memory import CATEGORIES
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.rehearsal.report import rehearsal_json, report_lines
from hlat.rehearsal.world import Rehearsal, default_ranks, rehearse

__all__ = [
    "CATEGORIES",
    "RankReport",
    "Rehearsal",
    "default_ranks",
    "rehearsal_json",
    "rehearse",
    "rehearse_rank",
    "report_lines",
]
