"""Forecast: the loss of a run before it starts, from the law that small runs of the same recipe give.

law.py      the law, and the best size for some compute
fitting.py  its constants from runs, and the range around them
conditions.py   what a run must share with a ladder
design.py   what the design of a ladder can say, and the best further run
shapes.py   how the loss falls within a run
tasks.py    accuracies of tasks from the loss, in two steps
ladder.py   the record of a ladder, and the forecast of a run
registered.py   the forecast in the run's folder
comparison.py   the forecast and the losses of the run
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.forecast.comparison import *
    from hlat.forecast.conditions import *
    from hlat.forecast.design import *
    from hlat.forecast.fitting import *
    from hlat.forecast.ladder import *
    from hlat.forecast.law import *
    from hlat.forecast.registered import *

__getattr__ = lazily(
    __name__,
    {
        "comparison": "TOO_HIGH_IN_A_ROW ForecastWatch expected_at",
        "conditions": "conditions_of",
        "design": "check_design",
        "fitting": "LEAST_RUNS LawFit LossRange Observation fit_law fit_range",
        "ladder": (
            "LADDER_FILE Forecast Ladder LadderRun SIZE_WORDS SizeKind model_sizes read_ladder sizes_of write_ladder"
        ),
        "registered": "FORECAST_FILE forecast_json parse_forecast read_forecast recipe_forecast write_forecast",
        "law": "CHINCHILLA FLOPS_PER_PARAMETER ScalingLaw",
    },
)
