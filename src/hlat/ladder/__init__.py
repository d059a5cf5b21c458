"""Ladders: small models of a recipe's form, trained to foretell the large one; and the proof of its transfer rule.

shapes.py        smaller models of the same form
planned_runs.py  runs of one size, with the schedule scaled in time
design.py        which sizes and token counts a budget pays for
cost.py          seconds of a run, from steps measured here
record.py        the design in the ladder's folder
planning.py      a question becomes a ladder that can be trained
execution.py     the runs, one after the other, and what they have reached
results.py       tables, the law, and the forecast
coordinates.py   sizes of activations and of their changes in the first steps, over widths and depths
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.ladder.coordinates import *
    from hlat.ladder.execution import *
    from hlat.ladder.planning import *
    from hlat.ladder.record import *
    from hlat.ladder.results import *

__getattr__ = lazily(
    __name__,
    {
        "coordinates": "CoordinateTable STEPS WIDTHS coordinate_lines coordinate_table coordinates_json",
        "execution": "array_of_sizes read_results record_results run_ladder",
        "planning": "LadderQuestion plan_ladder",
        "record": "LadderPlan",
        "results": "LadderReport design_lines",
    },
)
