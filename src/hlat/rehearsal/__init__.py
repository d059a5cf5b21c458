"""Dry run of the real program at full size without devices: memory, messages and FLOPs of any rank in one step."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.rehearsal.observers import CATEGORIES as CATEGORIES
    from hlat.rehearsal.plan import PARTS as PARTS
    from hlat.rehearsal.rank import RankReport as RankReport
    from hlat.rehearsal.rank import rehearse_rank as rehearse_rank
    from hlat.rehearsal.report import decision_lines as decision_lines
    from hlat.rehearsal.report import note_lines as note_lines
    from hlat.rehearsal.report import rehearsal_json as rehearsal_json
    from hlat.rehearsal.report import report_lines as report_lines
    from hlat.rehearsal.report import time_lines as time_lines
    from hlat.rehearsal.report import verdict_lines as verdict_lines
    from hlat.rehearsal.simulated_device import SimulatedDevice as SimulatedDevice
    from hlat.rehearsal.simulated_device import parse_device as parse_device
    from hlat.rehearsal.trace import ENDS as ENDS
    from hlat.rehearsal.trace import PRODUCT as PRODUCT
    from hlat.rehearsal.trace import TraceEvent as TraceEvent
    from hlat.rehearsal.world import Rehearsal as Rehearsal
    from hlat.rehearsal.world import default_ranks as default_ranks
    from hlat.rehearsal.world import rehearse as rehearse

__getattr__ = lazily(
    __name__,
    {
        "observers": "CATEGORIES",
        "plan": "PARTS",
        "rank": "RankReport rehearse_rank",
        "report": "decision_lines note_lines rehearsal_json report_lines time_lines verdict_lines",
        "simulated_device": "SimulatedDevice parse_device",
        "trace": "ENDS PRODUCT TraceEvent",
        "world": "Rehearsal default_ranks rehearse",
    },
)
