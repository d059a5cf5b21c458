"""Dry run of the real program at full size without devices: memory, messages and FLOPs of any rank in one step."""

from hlat.rehearsal.memory import CATEGORIES
from hlat.rehearsal.planned_step import PARTS
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.rehearsal.report import decision_lines, note_lines, rehearsal_json, report_lines, time_lines, verdict_lines
from hlat.rehearsal.simulated_device import SimulatedDevice, parse_device
from hlat.rehearsal.trace import ENDS, PRODUCT, TraceEvent
from hlat.rehearsal.world import Rehearsal, default_ranks, rehearse

__all__ = [
    "CATEGORIES",
    "ENDS",
    "PARTS",
    "PRODUCT",
    "RankReport",
    "Rehearsal",
    "SimulatedDevice",
    "TraceEvent",
    "decision_lines",
    "default_ranks",
    "note_lines",
    "parse_device",
    "rehearsal_json",
    "rehearse",
    "rehearse_rank",
    "report_lines",
    "time_lines",
    "verdict_lines",
]
