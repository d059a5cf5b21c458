"""Dry run of the real program at full size without devices: memory, messages and FLOPs of any rank in one step."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.rehearsal.observers import *
    from hlat.rehearsal.plan import *
    from hlat.rehearsal.rank import *
    from hlat.rehearsal.report import *
    from hlat.rehearsal.simulated_device import *
    from hlat.rehearsal.trace import *
    from hlat.rehearsal.world import *

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
