"""The real program at full size on no devices: what a rank of any world needs, sends and computes in a step."""

from hlat.rehearsal.memory import CATEGORIES
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.rehearsal.report import lines_of, plain
from hlat.rehearsal.traffic import Message
from hlat.rehearsal.world import Rehearsal, rehearse, usual_ranks

__all__ = [
    "CATEGORIES",
    "Message",
    "RankReport",
    "Rehearsal",
    "lines_of",
    "plain",
    "rehearse",
    "rehearse_rank",
    "usual_ranks",
]
