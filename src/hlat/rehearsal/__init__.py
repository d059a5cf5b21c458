"""The real program at full size on no devices: what a rank of any world needs, sends and computes in a step."""

from hlat.rehearsal.memory import CATEGORIES
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.rehearsal.report import rehearsal_json, report_lines
from hlat.rehearsal.traffic import Message
from hlat.rehearsal.world import Rehearsal, default_ranks, rehearse

__all__ = [
    "CATEGORIES",
    "Message",
    "RankReport",
    "Rehearsal",
    "default_ranks",
    "rehearsal_json",
    "rehearse",
    "rehearse_rank",
    "report_lines",
]
